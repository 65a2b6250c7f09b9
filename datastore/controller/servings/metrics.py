"""The Prometheus metrics of the controller of Servings."""

from __future__ import annotations

from prometheus_client import Gauge

SERVINGS = Gauge("datastore_controller_servings", "Servings by phase.", ["phase"])
