"""The only room that reads flags and the environment and starts processes."""
