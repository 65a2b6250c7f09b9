"""Save three checkpoints of 16 MiB, of which two are kept, and restore: `tensorflow_checkpoint.py DIRECTORY`."""

import sys
import time
from pathlib import Path

import tensorflow as tf

ROWS = 1 << 11

folder = Path(sys.argv[1], "checkpoints")
weights = tf.Variable(tf.zeros((ROWS, ROWS)))
manager = tf.train.CheckpointManager(tf.train.Checkpoint(weights=weights), str(folder), max_to_keep=2)
started = time.monotonic()
for step in range(1, 4):
    weights.assign(tf.fill((ROWS, ROWS), float(step)))
    manager.save(checkpoint_number=step)
restored = tf.Variable(tf.zeros((ROWS, ROWS)))
tf.train.Checkpoint(weights=restored).restore(tf.train.latest_checkpoint(str(folder))).assert_consumed()
seconds = time.monotonic() - started
assert float(tf.reduce_min(restored)) == 3.0
assert sorted(path.name for path in folder.glob("*.index")) == ["ckpt-2.index", "ckpt-3.index"]
print(seconds)
