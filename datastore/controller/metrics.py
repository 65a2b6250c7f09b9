"""The controller's numbers for Prometheus. Names are an interface: docs/OPERATIONS.md lists them."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

API_REQUESTS = Counter("datastore_controller_api_requests_total", "Requests to the API server", ["verb", "resource"])
RECONCILES = Counter("datastore_controller_reconciles_total", "Times a Datastore was worked on", ["outcome"])
RECONCILE_SECONDS = Histogram(
    "datastore_controller_reconcile_seconds",
    "How long one Datastore was worked on",
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30),
)
BACKEND_FAILURES = Counter("datastore_controller_backend_failures_total", "Looks at a backend that failed", ["reason"])
PODS_TOLD = Counter("datastore_controller_pods_told_total", "Pods annotated since a Secret of theirs was rotated")
DATASTORES = Gauge("datastore_controller_datastores", "Datastores by the reason of their Ready condition", ["reason"])
QUEUED = Gauge("datastore_controller_queued", "Datastores that wait to be worked on")
LAST_HEARTBEAT = Gauge("datastore_controller_heartbeat_seconds", "When the watch last showed our heartbeat, Unix time")
ACTIVE = Gauge("datastore_controller_active", "1: this replica works, 0: it waits for the others")
