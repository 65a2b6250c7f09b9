"""The supervisor: a small process that holds the mount, so that the server behind it may die and be replaced."""
