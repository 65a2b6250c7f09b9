"""Handwritten digits by PyTorch and DistributedDataParallel; data in /data, results in /out. Started by torchrun."""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

EPOCHS = int(os.environ.get("EPOCHS", "6"))
DATA, OUT = os.environ.get("DATA", "/data"), os.environ.get("OUT", "/out")
CHECKPOINT = f"{OUT}/pytorch.pt"

gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if gpu else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
torch.manual_seed(1)
torch.set_num_threads(1)

found = np.load(f"{DATA}/digits.npz")
pictures = torch.tensor(found["pictures"].astype(np.float32) / 16, device=device)
labels = torch.tensor(found["labels"].astype(np.int64), device=device)
learn, check = slice(rank, 1500, size), slice(1500, None)

model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).to(device)
first = 0
if os.path.exists(CHECKPOINT):
    saved = torch.load(CHECKPOINT, map_location=device)
    model.load_state_dict(saved["model"])
    first = saved["epoch"]
print(f"rank {rank} of {size} begins at epoch {first} on {device}", flush=True)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.3)
for epoch in range(first, EPOCHS):
    for at in range(0, len(pictures[learn]), 32):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(parallel(pictures[learn][at : at + 32]), labels[learn][at : at + 32])
        loss.backward()
        optimizer.step()
    if rank == 0:
        torch.save({"model": model.state_dict(), "epoch": epoch + 1}, CHECKPOINT + ".new")
        os.replace(CHECKPOINT + ".new", CHECKPOINT)
        print(f"epoch {epoch + 1} loss {loss.item():.3f}", flush=True)
    dist.barrier()
if rank == 0:
    right = (model(pictures[check]).argmax(1) == labels[check]).float().mean().item()
    print(f"accuracy {right:.3f}", flush=True)
dist.destroy_process_group()
