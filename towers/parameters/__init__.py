"""Where parameters live: on one device, copied to the towers, or in slices on their owners."""
