"""Connections between servers and clients: listening, admission, and a client's connections to all servers."""
