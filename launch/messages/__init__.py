"""What the programs say to a user."""
