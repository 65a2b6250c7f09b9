"""Measurements. Each module is one table: `python -m bench.w12` writes bench/results/w12.md."""
