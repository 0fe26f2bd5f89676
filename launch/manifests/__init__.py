"""What Kubernetes is asked for: a ring of pods as plain documents, one file a kind."""
