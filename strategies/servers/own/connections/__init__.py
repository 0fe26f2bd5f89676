"""Connections between servers and clients: who may listen, who is let in, and a client's own to all servers."""
