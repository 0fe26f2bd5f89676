"""The flags, a file for each subject, and what is built from them."""
