"""What is counted of Servings, for Prometheus."""

from __future__ import annotations

from prometheus_client import Gauge

SERVINGS = Gauge("datastore_controller_servings", "Servings by phase.", ["phase"])
