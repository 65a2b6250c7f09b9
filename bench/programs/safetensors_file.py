"""Save 64 MiB of tensors and load them again: `safetensors_file.py DIRECTORY`."""

import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

TENSORS = 16
ROWS = 1 << 10

source = np.random.default_rng(0)
tensors = {f"layer{number}": source.random((ROWS, ROWS), dtype=np.float32) for number in range(TENSORS)}
path = Path(sys.argv[1], "model.safetensors")
started = time.monotonic()
save_file(tensors, path)
loaded = load_file(path)
seconds = time.monotonic() - started
assert all(np.array_equal(tensors[name], loaded[name]) for name in tensors)
print(seconds)
