"""Handwritten digits by JAX over several processes; data in /data, results in /out."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

STEPS = 200
DATA, OUT = os.environ.get("DATA", "/data"), os.environ.get("OUT", "/out")

if "JAX_COORDINATOR_ADDRESS" in os.environ:
    jax.distributed.initialize(
        num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
        process_id=int(os.environ["JAX_PROCESS_ID"]),
        # Else JAX asks the API server of a cluster, if the image has the package kubernetes; the pod has no right to.
        cluster_detection_method="deactivate",
    )
rank, size = jax.process_index(), jax.process_count()
found = np.load(f"{DATA}/digits.npz")
pictures, labels = found["pictures"].astype(np.float32) / 16, found["labels"].astype(np.int32)
mine = slice(rank, 1500, size)
print(f"process {rank} of {size} has {len(pictures[mine])} pictures, {jax.device_count()} devices in all", flush=True)


@jax.jit
def gradient(weights, batch, right):
    def loss(weights):
        return -jnp.mean(jax.nn.log_softmax(batch @ weights)[jnp.arange(len(right)), right])

    return jax.grad(loss)(weights)


weights = jnp.zeros((64, 10))
for _ in range(STEPS):
    every = multihost_utils.process_allgather(gradient(weights, pictures[mine], labels[mine]))
    weights = weights - 2.0 * jnp.mean(every.reshape(-1, 64, 10), axis=0)
accuracy = float(jnp.mean(jnp.argmax(pictures[1500:] @ weights, axis=1) == labels[1500:]))
if rank == 0:
    np.save(f"{OUT}/jax.npy", np.asarray(weights))
    print(f"accuracy {accuracy:.3f}", flush=True)
