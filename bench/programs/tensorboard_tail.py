"""Write scalars as a training does and read them as TensorBoard does: `tensorboard_tail.py WRITE READ`.

WRITE and READ are the same directory, or the same bucket through two mounts. Each flushed step must reach the reader
while the writer keeps its file open.
"""

import sys
import time
from pathlib import Path

import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STEPS = 5
DEADLINE_S = 120.0
POLL_S = 0.1

write, read = (Path(argument, "run") for argument in sys.argv[1:3])
started = time.monotonic()
writer = tf.summary.create_file_writer(str(write))
slowest_s = 0.0
events = None
for step in range(STEPS):
    with writer.as_default():
        tf.summary.scalar("loss", 1.0 / (step + 1), step=step)
    writer.flush()
    flushed = time.monotonic()
    seen = -1
    while seen < step:
        if time.monotonic() - flushed > DEADLINE_S:
            sys.exit(f"step {step} was flushed, but the reader does not see it after {DEADLINE_S:.0f} s")
        time.sleep(POLL_S)
        if events is None and read.is_dir() and any(read.iterdir()):
            events = EventAccumulator(str(read))
        if events is not None:
            events.Reload()
            if "loss" in events.Tags()["tensors"]:
                seen = events.Tensors("loss")[-1].step
    slowest_s = max(slowest_s, time.monotonic() - flushed)
writer.close()
print(f"the slowest step took {slowest_s:.2f} s to be seen")
print(time.monotonic() - started)
