"""The Prometheus metrics of every controller. Their names are an interface (docs/OPERATIONS.md lists them)."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

API_REQUESTS = Counter("datastore_controller_api_requests_total", "Requests to the API server", ["verb", "resource"])
RECONCILES = Counter("datastore_controller_reconciles_total", "Reconciliations of objects", ["outcome"])
RECONCILE_SECONDS = Histogram(
    "datastore_controller_reconcile_seconds",
    "Duration of one reconciliation",
    buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30),
)
QUEUED = Gauge("datastore_controller_queued", "Objects that wait for a reconciliation")
LAST_ECHO = Gauge("datastore_controller_heartbeat_seconds", "When the watch last showed the Lease, Unix time")
LEADING = Gauge("datastore_controller_active", "1: this replica works, 0: it waits for another")
