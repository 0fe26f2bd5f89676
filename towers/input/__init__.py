"""Which part of a batch each tower computes, and how it gets there; iterators over batches."""
