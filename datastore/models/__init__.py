"""Models: directories that are saved once, as numbered versions that never change, in a store that any tool reads."""
