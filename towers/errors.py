"""The error for users' mistakes, in contrast to errors of the program."""


class UserError(ValueError):
    """The user asked for something impossible. The message is one line with the value, the rule and the fix.

    The programs in `launch` print it without a traceback. Any other ValueError is an error in code (ours, Keras's,
    the user's own model) and keeps its traceback.
    """

    # Keras appends lines about arguments to exceptions raised in a layer's call, except those with this mark.
    _keras_call_info_injected = True
