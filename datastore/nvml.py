"""Access to NVML, the interface of NVIDIA's driver, where there is a driver."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def driver() -> Iterator[Any]:
    """Yield NVML's module, or None where there is no driver. It is imported here, as most machines have no GPU."""
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def memory_used(nvml: Any, handle: object) -> int:
    """Return the bytes of a GPU's memory in use, without those that the driver reserves, where it tells them apart."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)
    except nvml.NVMLError:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
