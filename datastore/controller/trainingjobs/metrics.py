"""The Prometheus metrics of the controller of TrainingJobs. Names are an interface: docs/OPERATIONS.md lists them."""

from __future__ import annotations

from prometheus_client import Gauge, Histogram

TRAININGJOBS = Gauge("datastore_controller_trainingjobs", "TrainingJobs by phase", ["phase"])
FREED_SECONDS = Histogram(
    "datastore_controller_trainingjob_freed_seconds",
    "From the end of a training until nothing of it ran",
    buckets=(1, 2, 5, 10, 20, 60, 300),
)
