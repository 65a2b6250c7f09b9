"""The Prometheus endpoint of a mount server."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from datastore.errors import InvalidManifest, MountFailed
from datastore.fuse.prometheus import Endpoint, families, parse_address
from datastore.fuse.server import Metrics, own_process
from datastore.histogram import Histogram
from tests.patience import PATIENCE_S, eventually
from tests.promises import promise
from tests.servers import reserved_port


def status() -> dict[str, Any]:
    histogram = Histogram()
    for spent_ns in (10_000, 20_000, 5_000_000):
        histogram.add(spent_ns)
    row = {"count": 3, "seconds": 0.00503, "buckets": histogram.buckets()}
    return {
        "name": "digits",
        "mountpoint": "/mnt",
        "location": "s3://digits/",
        "transport": "kernel",
        "uptimeSeconds": 12.5,
        "restarts": 2,
        "requests": {"LOOKUP": 7},
        "errors": {"EIO": 1},
        "latency": {"stat": row},
        "inFlight": 1,
        "readBytes": 4096,
        "writtenBytes": 10,
        "passthroughOpen": 3,
        "cache": {"bytes": 100, "limit": 1000, "hits": 9, "misses": 1, "hitBytes": 90, "missBytes": 10},
        "dirty": [{"path": "a", "bytes": 5, "error": None}, {"path": "b", "bytes": 6, "error": "403"}],
        "nodes": 4,
        "storage": {"since": 1.0, "silentSeconds": 12.5, "lastAsked": 2.0, "error": ""},
        "store": {
            "get": {
                "calls": 3,
                "sent_bytes": 0,
                "received_bytes": 90,
                "seconds": 0.00503,
                "errors": {"AccessDenied": 1},
                "retries": {"Throttled": 2},
                "buckets": histogram.buckets(),
            }
        },
    }


def scraped(url: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=PATIENCE_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@promise("S-63")
def test_a_scrape_shows_every_number_of_the_status() -> None:
    endpoint = Endpoint("127.0.0.1:0")
    endpoint.start(status)
    try:
        seen = scraped(endpoint.url)
    finally:
        endpoint.stop()

    def value(name: str, /, **labels: str) -> float:
        return seen[name, frozenset(labels.items())]

    assert value("datastore_fuse_requests_total", operation="LOOKUP") == 7
    assert value("datastore_fuse_errors_total", errno="EIO") == 1
    assert value("datastore_fuse_request_duration_seconds_count", **{"class": "stat"}) == 3
    assert value("datastore_fuse_request_duration_seconds_sum", **{"class": "stat"}) == pytest.approx(0.00503)
    assert value("datastore_fuse_request_duration_seconds_bucket", **{"class": "stat", "le": "+Inf"}) == 3
    assert value("datastore_fuse_read_bytes_total") == 4096
    assert value("datastore_store_requests_total", method="get") == 3
    assert value("datastore_store_retries_total", method="get", error="Throttled") == 2
    assert value("datastore_store_errors_total", method="get", error="AccessDenied") == 1
    assert value("datastore_store_received_bytes_total", method="get") == 90
    assert value("datastore_store_silent_seconds") == 12.5
    assert value("datastore_cache_hits_total") == 9
    assert value("datastore_cache_size_bytes") == 100
    assert value("datastore_dirty_files") == 2
    assert value("datastore_dirty_bytes") == 11
    assert value("datastore_dirty_files_failing") == 1
    assert value("datastore_server_restarts_total") == 2
    assert value("process_resident_memory_bytes") > 1 << 20
    assert value("process_open_fds") > 2
    labels = {"name": "digits", "mountpoint": "/mnt", "location": "s3://digits/", "transport": "kernel"}
    assert value("datastore_mount_info", **labels) == 1


def test_names_have_a_prefix_a_unit_and_a_help_text() -> None:
    for family in families(status()):
        assert family.name.startswith("datastore_")
        assert family.documentation.endswith(".")
        assert not {"ms", "milliseconds", "kb", "megabytes"} & set(family.name.split("_"))


def test_each_name_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/cli.md").read_text()
    suffix = {"counter": "_total", "info": "_info"}
    names = {family.name + suffix.get(family.type, "") for family in families(status())}
    assert {name for name in names if not re.search(rf"`{name}[`{{]", text)} == set()


def test_a_status_of_another_transport_has_fewer_numbers() -> None:
    names = [family.name for family in families({"name": "x"})]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("text", ["", "9464", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "127.0.0.1:-1"])
def test_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidManifest, match="an address and a port such as"):
        parse_address(text)


def test_addresses() -> None:
    assert parse_address("127.0.0.1:9464") == ("127.0.0.1", 9464)
    assert parse_address("[::1]:1") == ("::1", 1)
    assert parse_address(":9464") == ("127.0.0.1", 9464)


def test_a_taken_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(MountFailed, match=f"--metrics 127.0.0.1:{port}: can't listen there"):
            Metrics(f"127.0.0.1:{port}")


def test_a_new_server_of_a_living_mount_waits_for_the_address() -> None:
    with reserved_port() as port:
        with socket.create_server(("127.0.0.1", port)):
            metrics = Metrics(f"127.0.0.1:{port}", resumed=True)
            metrics.start(status)
            assert metrics.status() == {}
        try:
            eventually(metrics.status)
            assert ("datastore_dirty_files", frozenset()) in scraped(metrics.status()["metrics"])
        finally:
            metrics.stop()


def test_no_endpoint_costs_no_import() -> None:
    code = (
        "import sys, datastore.fuse.server\n"
        "from datastore.fuse.server import Metrics\n"
        "Metrics('').start(dict)\n"
        "sys.exit('prometheus_client' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S).returncode == 0


def test_the_process_tells_of_itself() -> None:
    own = own_process()
    assert own["rssBytes"] > 1 << 20
    assert own["openFiles"] > 2
    assert own["threads"] >= 1
