"""Ordinary programs that work in a directory; each prints the seconds of its work as the last line."""
