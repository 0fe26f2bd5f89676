"""A trained classifier that looks at each image from several sides: as it is and mirrored, in place and shifted.

    logits = mean of (in place, mean of (one pixel up and left, one pixel down and right)),
             each the mean of an image and its mirror image

after Jordan 2024 (arXiv:2404.00498). Built of Keras's own operations, so that its file loads anywhere.
"""

import keras
from keras import layers, ops

from towers.errors import UserError

_SHIFT = 1


def with_test_time_views(model: keras.Model) -> keras.Model:
    """The model from images [N, H, W, C] to the mean logits over six views; it shares the model's weights.

    Raises:
      UserError: it takes something else than images.
    """
    if len(model.inputs) != 1 or len(model.inputs[0].shape) != 4:
        raise UserError(f"test_time_views of {model.name!r}: its input is no image [N, H, W, C]; leave it out")
    images = layers.Input(model.inputs[0].shape[1:], name="images")
    around = [(0, 0), (_SHIFT, _SHIFT), (_SHIFT, _SHIFT), (0, 0)]
    padded = ops.pad(images, around, mode="reflect")
    margin = (0, 2 * _SHIFT)
    shifted = [layers.Cropping2D((side, side))(padded) for side in (margin, margin[::-1])]

    def both_sides(view):
        return layers.Average()([model(view), model(ops.flip(view, axis=2))])

    logits = layers.Average()([both_sides(images), layers.Average()([both_sides(view) for view in shifted])])
    return keras.Model(images, logits, name=f"{model.name}_views")
