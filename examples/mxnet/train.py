"""Handwritten digits by MXNet and its distributed KVStore; data in /data, results in /out."""

import os

import mxnet as mx  # makes a scheduler or a server of this process, if DMLC_ROLE says so, and never returns then
import numpy as np

STEPS = 60
DATA, OUT = os.environ.get("DATA", "/data"), os.environ.get("OUT", "/out")

store = mx.kv.create("dist_sync" if "DMLC_ROLE" in os.environ else "local")
found = np.load(f"{DATA}/digits.npz")
pictures, labels = found["pictures"].astype(np.float32) / 16, found["labels"].astype(np.int64)
mine = slice(store.rank, 1500, store.num_workers)
print(f"worker {store.rank} of {store.num_workers} has {len(pictures[mine])} pictures", flush=True)

weights, total = mx.nd.zeros((64, 10)), mx.nd.zeros((64, 10))
store.init("gradient", total)
batch, right = mx.nd.array(pictures[mine]), mx.nd.array(labels[mine])
for _ in range(STEPS):
    weights.attach_grad()
    with mx.autograd.record():
        loss = -mx.nd.pick(mx.nd.log_softmax(mx.nd.dot(batch, weights)), right).mean()
    loss.backward()
    # The server adds up what all workers push, and each pulls the sum.
    store.push("gradient", weights.grad)
    store.pull("gradient", out=total)
    mx.nd.waitall()
    weights = weights - 1.0 / store.num_workers * total
if store.rank == 0:
    guess = mx.nd.dot(mx.nd.array(pictures[1500:]), weights).argmax(axis=1).asnumpy()
    mx.nd.save(f"{OUT}/mxnet.params", {"weights": weights})
    print(f"accuracy {float((guess == labels[1500:]).mean()):.3f}", flush=True)
