"""Measurements: `python -m bench` measures everything, `python -m bench.w12` writes bench/results/w12.md."""
