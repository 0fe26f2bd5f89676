"""Test-time augmentation: a trained classifier whose logits are averaged over six views of each image.

    both(x) = (model(x) + model(mirrored x)) / 2
    logits  = both(image) / 2 + (both(image shifted up and left) + both(image shifted down and right)) / 4

The shifts are by one pixel, after Jordan 2024 (arXiv:2404.00498). The model consists of Keras's own operations, so
that its file loads without this project.
"""

import keras
from keras import layers, ops

from towers.errors import UserError

_SHIFT = 1


def with_test_time_views(model: keras.Model) -> keras.Model:
    """A model from images [N, H, W, C] to the mean logits over six views; it shares the weights of `model`.

    Raises:
      UserError: the model's input is not one batch of images.
    """
    if len(model.inputs) != 1 or len(model.inputs[0].shape) != 4:
        raise UserError(
            f"test_time_views of {model.name!r}: its input is not one image [N, H, W, C]; omit test_time_views"
        )
    images = layers.Input(model.inputs[0].shape[1:], name="images")
    around = [(0, 0), (_SHIFT, _SHIFT), (_SHIFT, _SHIFT), (0, 0)]
    padded = ops.pad(images, around, mode="reflect")
    margin = (0, 2 * _SHIFT)
    shifted = [layers.Cropping2D((side, side))(padded) for side in (margin, margin[::-1])]

    def both_sides(view):
        return layers.Average()([model(view), model(ops.flip(view, axis=2))])

    logits = layers.Average()([both_sides(images), layers.Average()([both_sides(view) for view in shifted])])
    return keras.Model(images, logits, name=f"{model.name}_views")
