"""Open files: opening, reading, writing, closing, and taking them over from a server that died."""
