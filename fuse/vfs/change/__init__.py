"""Changes of names and attributes."""
