"""The form of the programs' messages to a user."""
