"""What is trained: networks (Keras 3, stock layers only), data sets, and the tasks that join them.

Networks for images take normalised float32 images [N, H, W, C] and return float32 logits [N, num_classes];
`models.networks.registry` builds them by name. `models.tasks` lists the networks of other tasks. This package
imports `towers`, never `strategies` or `launch`.
"""

import lazy_loader

# Chooses TensorFlow's kernels before a module of this package imports TensorFlow.
import towers  # noqa: F401

# A public name is imported at its first use: importing models alone does not import TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
