"""Trains digits by logistic regression and writes model.onnx, with some images to try it: `python train.py DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
from onnx import TensorProto, checker, helper, numpy_helper, save
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression


def main(directory: Path) -> None:
    """Train, and write the model."""
    images, digits = load_digits(return_X_y=True)
    images /= 16
    trained = LogisticRegression(max_iter=100).fit(images, digits)
    weights = numpy_helper.from_array(trained.coef_.T.astype(numpy.float32), "weights")
    bias = numpy_helper.from_array(trained.intercept_.astype(numpy.float32), "bias")
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["images", "weights", "bias"], ["scores"]),
            helper.make_node("ArgMax", ["scores"], ["digits"], axis=1, keepdims=0),
        ],
        "digits",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("digits", TensorProto.INT64, ["n"])],
        [weights, bias],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    directory.mkdir(parents=True, exist_ok=True)
    save(model, str(directory / "model.onnx"))
    # The digit and its 64 pixels in a line, of images that every program can try.
    table = numpy.column_stack([digits[:100], images[:100]])
    numpy.savetxt(directory / "digits.csv", table, delimiter=",", fmt="%g")
    print(f"{trained.score(images[:100], digits[:100]):.2f} of 100 digits are right")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
