"""Faster kernels that replace those of Keras's layers while a tower is traced; same results, same weights."""
