"""What needs a GPU: run by hand on a machine that has one (`python -m pytest tests/gpu`), in no tier of CI."""
