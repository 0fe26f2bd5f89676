"""Parameter servers of our own: their server, worker and chief, and the messages between them."""
