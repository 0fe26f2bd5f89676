"""Networks made of stock Keras 3 layers: one file for each family; `registry` builds them by name."""
