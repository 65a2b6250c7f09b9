"""The supervisor: a small process that holds the mount while the server behind it may die, be replaced, and go on."""
