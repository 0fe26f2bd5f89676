"""The modes of training, behind one contract, and the Trainer that runs any of them."""

import lazy_loader

# Chooses TensorFlow's kernels before a module of this package imports TensorFlow.
import towers  # noqa: F401

# A public name is imported at its first use: importing strategies.cluster alone does not import TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
