"""What the workers of a ring send each other: how they connect, sum and gather, and who is lost."""
