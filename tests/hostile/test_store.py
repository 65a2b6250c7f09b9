"""The S3 client in front of hostile servers: whom it asks, how long it takes, and how much it holds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from datastore.api.source import S3Location
from datastore.errors import CorruptBody, DeadlineExceeded, StoreError
from datastore.fuse.loop import now
from datastore.fuse.store.s3 import probe
from datastore.fuse.store.s3.caller import Caller
from datastore.fuse.store.s3.credentials import StaticSource
from datastore.fuse.store.s3.dialing import Route
from datastore.fuse.store.s3.endpoint import Endpoint, resolve
from datastore.fuse.store.s3.messages import Request
from datastore.fuse.store.s3.transport import Transport
from tests.adapter import open_adapter
from tests.driving import the_loop
from tests.hostile import servers
from tests.hostile.asking import KEYS, PATIENT, ask_all, location_of
from tests.hostile.servers import ATTACKS, SLOW, hostile, redirecting, region_named
from tests.promises import promise

TOO_MUCH = ("endless-listing", "many-objects", "many-elements", "deep-elements", "many-attributes", "long-namespaces")
HONEST_LISTINGS = {"redirecting", "endless-object", "lying-length", "whole-in-place-of-range"}
ENDS_S = 120.0
"""Each call has 0.6 s; a busy machine takes longer to run seventeen threads of ours and as many of the server. What the
servers do has no end."""
HELD_UP_S = 5.0
"""So long nobody else may wait for the loop of a mount; 0.4 s were measured."""
GROWTH_MIB = 96
"""Of a process with sixteen requests at once, as the controller has them; 63 were measured."""


@promise("S-200")
@pytest.mark.parametrize("on_loop", [False, True])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(status: int, *, on_loop: bool) -> None:
    """The other host could be one that only this machine reaches, such as a cloud's metadata service."""
    with hostile(servers.page) as elsewhere, hostile(redirecting(f"{elsewhere.endpoint}/keys", status)) as server:
        answers = ask_all(server.endpoint, on_loop=on_loop)
    assert elsewhere.heads == []
    assert all(isinstance(answers[name], StoreError) for name in answers if name.startswith("get"))


@promise("S-200")
@pytest.mark.parametrize("region", ["x.evil.example/", "a@evil.example", "EVIL", "e" * 64, "-a", "eu west"])
def test_a_region_that_is_no_name_of_one_leads_nowhere(region: str) -> None:
    """On AWS it becomes a part of the host's name."""
    asked: list[str] = []
    with hostile(region_named(region)) as server:

        def connect(to: Endpoint) -> Transport:
            asked.append(to.host)
            return Transport(Route("127.0.0.1", server.port, False), limits=PATIENT)

        caller = Caller(resolve(S3Location(bucket="data")), StaticSource(KEYS), connect)
        with pytest.raises(StoreError):
            now(caller.send(Request(method="GET")))
        caller.close()
    assert asked == ["data.s3.us-east-1.amazonaws.com"]
    assert len(server.heads) == 1


@promise("S-201", "S-202")
@pytest.mark.parametrize("on_loop", [False, True])
@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_every_call_ends_in_time_with_an_error_of_ours(name: str, *, on_loop: bool) -> None:
    held_up_s = 0.0
    with hostile(ATTACKS[name]) as server, ThreadPoolExecutor(1) as threads:
        began = time.monotonic()
        asking = threads.submit(ask_all, server.endpoint, on_loop=on_loop)
        while not asking.done():
            asked_at = time.monotonic()
            the_loop().call(lambda: None)
            held_up_s = max(held_up_s, time.monotonic() - asked_at)
        answers, seconds = asking.result(), time.monotonic() - began
    odd = {call: repr(error) for call, error in answers.items() if not isinstance(error, StoreError | None)}
    assert odd == {}
    assert seconds < ENDS_S
    assert held_up_s < HELD_UP_S
    if name in SLOW:
        assert isinstance(answers["list"], DeadlineExceeded)


@promise("S-201")
@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_listing_larger_than_there_may_be_is_refused(name: str) -> None:
    """By its size, while there is time for more."""
    with (
        hostile(ATTACKS[name]) as server,
        closing(open_adapter(location_of(server.endpoint), limits=PATIENT)) as store,
        pytest.raises(CorruptBody),
    ):
        now(store.list_page(""))


@promise("S-202")
@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_a_probe_ends_in_time_and_says_why(name: str) -> None:
    """It is what a person waits for before a mount."""
    with hostile(ATTACKS[name]) as server:
        began = time.monotonic()
        error: Exception | None = None
        try:
            probe(location_of(server.endpoint), writable=False, deadline_s=0.5)
        except StoreError as raised:
            error = raised
        assert time.monotonic() - began < ENDS_S
    assert error is not None or name in HONEST_LISTINGS
    assert len(str(error)) < 2000


@promise("S-201")
def test_all_hostile_servers_at_once_cost_little_memory() -> None:
    """As in the controller, which looks at the servers of all tenants in one process."""
    with ExitStack() as stack:
        endpoints = {name: stack.enter_context(hostile(attack)).endpoint for name, attack in ATTACKS.items()}
        done = subprocess.run(
            [sys.executable, "-m", "tests.hostile.asking"],
            input=json.dumps(endpoints),
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["odd"] == {}
    assert told["grown_mib"] < GROWTH_MIB
