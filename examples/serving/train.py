"""Trains digits by logistic regression and writes weights.npz, which server.py serves: `python train.py DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression


def main(directory: Path, steps: int) -> None:
    """Train for so many steps, and write the model."""
    images, digits = load_digits(return_X_y=True)
    model = LogisticRegression(max_iter=steps).fit(images, digits)
    directory.mkdir(parents=True, exist_ok=True)
    numpy.savez(directory / "weights.npz", weights=model.coef_.T, bias=model.intercept_)
    print(f"{model.score(images, digits):.3f} of the digits are right")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
