"""The Prometheus metrics of the controller of Datastores. Their names are an interface (docs/OPERATIONS.md)."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

BACKEND_FAILURES = Counter("datastore_controller_backend_failures_total", "Failed checks of a backend", ["reason"])
PODS_TOLD = Counter("datastore_controller_pods_told_total", "Pods annotated because one of their Secrets was rotated")
DATASTORES = Gauge("datastore_controller_datastores", "Datastores by the reason of their Ready condition", ["reason"])
