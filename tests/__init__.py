"""The tests; docs/ARCHITECTURE.md says which directory holds what. `make test` runs them all."""
