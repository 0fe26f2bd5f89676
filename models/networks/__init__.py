"""Networks of stock Keras 3 layers: one file a family, `registry` names them all."""
