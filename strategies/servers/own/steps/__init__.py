"""Which step a worker computes, and how the servers agree on its update: asynchronous and synchronous."""
