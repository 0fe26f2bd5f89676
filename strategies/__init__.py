"""Who cooperates: one file a mode behind one contract, and the Trainer that drives any of them."""
