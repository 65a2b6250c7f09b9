"""The way of changed files to the bucket."""
