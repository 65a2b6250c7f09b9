"""Lookups of names and readdir: nodes and listings from memory or the store, and how long they stay fresh."""
