"""What a directory over objects means: names, attributes, listings, files, changes. The only place that decides."""
