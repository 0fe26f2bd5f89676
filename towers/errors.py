"""The one error that speaks to the user rather than to the programmer."""


class UserError(ValueError):
    """What the user asked for cannot be done: the message is one line with the value, the rule and the fix.

    The binaries in `launch` print it without a traceback. Any other ValueError is somebody's mistake
    in code (ours, Keras's, the user's own model) and keeps its traceback.
    """

    # Keras adds lines about the arguments to what is raised within a layer's call, but for errors so marked.
    _keras_call_info_injected = True
