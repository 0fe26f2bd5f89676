"""The precisions in which rings and parameter servers may send gradients."""

import tensorflow as tf

# The dtype that float32 gradients are cast to before they are sent; None sends them as they are.
WIRE_PRECISIONS = {"float32": None, "bfloat16": tf.bfloat16, "float16": tf.float16}
