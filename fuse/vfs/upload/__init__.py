"""Sends changed files to the bucket."""
