"""Parameter servers: processes that hold and update the parameters, the workers that compute, and the chief."""
