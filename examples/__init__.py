"""Products that run on onlinerl."""
