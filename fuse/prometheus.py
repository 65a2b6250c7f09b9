"""A mount's Prometheus endpoint: the numbers of `datastore status` in the text format, over HTTP at HOST:PORT.

Names and units follow prometheus.io/docs/practices/naming. Counters begin at 0 with each mount server, as is usual;
datastore_server_restarts_total continues, because the supervisor counts it. The import takes 60 ms, so only a mount
with an endpoint does it. One thread serves one scrape after another; a client has REQUEST_S to send its request.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http.server import HTTPServer
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily as Histogram
from prometheus_client.core import InfoMetricFamily
from prometheus_client.exposition import MetricsHandler
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from datastore.errors import InvalidManifest, MountFailed
from datastore.histogram import EDGES_S

REQUEST_S = 5.0
_POLL_S = 0.5

Status = Mapping[str, Any]


def parse_address(text: str) -> tuple[str, int]:
    """Parse an address such as `127.0.0.1:9464` or `[::1]:9464`. Errors: InvalidManifest, as for any wrong option."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise InvalidManifest(f"--metrics {text}: an address and a port such as 127.0.0.1:9464 are needed")
    return host.strip("[]") or "127.0.0.1", int(port)


class Endpoint:
    """The HTTP server; it serves from start() to stop()."""

    def __init__(self, address: str) -> None:
        """Bind the address. Errors: InvalidManifest; MountFailed, which names the address."""
        host, port = parse_address(address)
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)
        try:
            self._server = _listen(host, port, self._registry)
        except OSError as error:
            raise MountFailed(f"--metrics {address}: can't listen there: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)

    @property
    def url(self) -> str:
        """The URL to scrape; for port 0 it has the port that the kernel chose."""
        host, port = self._server.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}/metrics"

    def start(self, source: Callable[[], Status]) -> None:
        """Answer scrapes with the mount's status, which `source` returns; it is called on the endpoint's thread."""
        self._registry.register(_Numbers(source))
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(REQUEST_S + _POLL_S)
        self._server.server_close()


def _listen(host: str, port: int, registry: CollectorRegistry) -> HTTPServer:
    class Server(HTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

    class Handler(MetricsHandler):
        timeout = REQUEST_S

    Handler.registry = registry
    return Server((host, port), Handler)


class _Numbers(Collector):
    def __init__(self, source: Callable[[], Status]) -> None:
        self._source = source

    def collect(self) -> Iterable[Metric]:
        return families(self._source())


def families(status: Status) -> Iterator[Metric]:
    """Convert a status to metric families. Pure."""
    yield InfoMetricFamily(
        "datastore_mount",
        "Which mount this is.",
        {key: str(status.get(key, "")) for key in ("name", "mountpoint", "location", "transport")},
    )
    yield Gauge("datastore_server_uptime_seconds", "Age of the mount server.", status.get("uptimeSeconds", 0))
    yield Counter("datastore_server_restarts", "Servers that died and were replaced.", status.get("restarts", 0))
    yield from _requests(status)
    yield from _store(status.get("store", {}))
    silent_s = status.get("storage", {}).get("silentSeconds", 0.0)
    yield Gauge("datastore_store_silent_seconds", "For how long the store has not answered.", silent_s)
    yield from _cache(status.get("cache", {}))
    dirty = status.get("dirty", ())
    yield Gauge("datastore_dirty_files", "Files with bytes that the store does not have.", len(dirty))
    yield Gauge("datastore_dirty_bytes", "Size of those files.", sum(row["bytes"] for row in dirty))
    failing = sum(1 for row in dirty if row.get("error"))
    yield Gauge("datastore_dirty_files_failing", "Those of them whose last upload failed.", failing)
    yield Gauge("datastore_nodes", "Files and directories in memory.", status.get("nodes", 0))


def _requests(status: Status) -> Iterator[Metric]:
    counts = Counter("datastore_fuse_requests", "Requests from the kernel.", labels=["operation"])
    for name, count in status.get("requests", {}).items():
        counts.add_metric([name], count)
    yield counts
    errors = Counter("datastore_fuse_errors", "Requests that failed, by errno.", labels=["errno"])
    for name, count in status.get("errors", {}).items():
        errors.add_metric([name], count)
    yield errors
    latency = Histogram("datastore_fuse_request_duration_seconds", "From a request to its answer.", labels=["class"])
    for name, row in status.get("latency", {}).items():
        _add(latency, name, row["buckets"], row["seconds"])
    yield latency
    yield Gauge("datastore_fuse_requests_in_flight", "Requests not answered yet.", status.get("inFlight", 0))
    yield Counter("datastore_fuse_read_bytes", "Bytes read through the server.", status.get("readBytes", 0))
    yield Counter("datastore_fuse_written_bytes", "Bytes written to the server.", status.get("writtenBytes", 0))
    opened = status.get("passthroughOpen", 0)
    yield Gauge("datastore_fuse_passthrough_files", "Open files that the kernel reads by itself.", opened)


def _store(store: Mapping[str, Any]) -> Iterator[Metric]:
    calls = Counter("datastore_store_requests", "Calls to the store, retries not counted.", labels=["method"])
    sent = Counter("datastore_store_sent_bytes", "Bytes of bodies sent.", labels=["method"])
    received = Counter("datastore_store_received_bytes", "Bytes of bodies received.", labels=["method"])
    errors = Counter("datastore_store_errors", "Calls that failed, by class.", labels=["method", "error"])
    retries = Counter("datastore_store_retries", "Tries that failed and were repeated.", labels=["method", "error"])
    latency = Histogram("datastore_store_request_duration_seconds", "A call with its retries.", labels=["method"])
    for method, row in store.items():
        calls.add_metric([method], row["calls"])
        sent.add_metric([method], row["sent_bytes"])
        received.add_metric([method], row["received_bytes"])
        for name, count in row["errors"].items():
            errors.add_metric([method, name], count)
        for name, count in row["retries"].items():
            retries.add_metric([method, name], count)
        _add(latency, method, row["buckets"], row["seconds"])
    yield from (calls, sent, received, errors, retries, latency)


def _cache(cache: Mapping[str, int]) -> Iterator[Metric]:
    yield Gauge("datastore_cache_size_bytes", "Bytes in the cache directory.", cache.get("bytes", 0))
    yield Gauge("datastore_cache_limit_bytes", "How large it may become.", cache.get("limit", 0))
    yield Counter("datastore_cache_hits", "Reads answered from memory or disk.", cache.get("hits", 0))
    yield Counter("datastore_cache_misses", "Reads that waited for the store.", cache.get("misses", 0))
    yield Counter("datastore_cache_hit_bytes", "Bytes of those reads.", cache.get("hitBytes", 0))
    yield Counter("datastore_cache_miss_bytes", "Bytes of those reads.", cache.get("missBytes", 0))


def _add(family: Histogram, label: str, buckets: Sequence[int], seconds: float) -> None:
    edges = [*(repr(edge) for edge in EDGES_S), "+Inf"]
    family.add_metric([label], list(zip(edges, map(float, accumulate(buckets)), strict=True)), seconds)
