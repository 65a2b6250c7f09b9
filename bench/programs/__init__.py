"""Ordinary programs that know only directories; each prints the seconds of its work as the last line."""
