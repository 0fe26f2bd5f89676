"""Parameter servers: processes that keep the parameters and update them, and those that compute for them."""
