"""How many bytes training needs, by published formulas. Plain arithmetic, no tensors."""
