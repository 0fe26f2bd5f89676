"""The flags, one file per subject, and the options that are built from them."""
