"""How the workers of a ring connect, sum and gather, and detect lost workers."""
