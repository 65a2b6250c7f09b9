"""The two ways to wait for a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from datastore.fuse.loop import now
from datastore.fuse.store.s3.connections import trust
from tests.authority import HERE, Authority, Identity
from tests.driving import resolve
from tests.unit.store.scripted import PlainTransport, Reply, ScriptedServer, Served, Transports, Wait


@pytest.fixture(params=[now, resolve], ids=["blocking", "loop"])
def wait(request: pytest.FixtureRequest) -> Wait:
    """By a thread that blocks, and on a loop."""
    return cast("Wait", request.param)


@pytest.fixture
def transports(wait: Wait) -> Iterator[Transports]:
    """Those of one test."""
    made = Transports(wait)
    yield made
    made.close()


@pytest.fixture(scope="session")
def identity(authority: Authority) -> Identity:
    """Of a server here."""
    return authority.issue("here", HERE)


@pytest.fixture(params=["plain", "tls"])
def served(request: pytest.FixtureRequest, transports: Transports) -> Served:
    """Makes a server of answers and a transport to it."""
    ours: Identity | None = request.getfixturevalue("identity") if request.param == "tls" else None

    @contextmanager
    def serve(*replies: Reply | bytes, **options: Any) -> Iterator[tuple[PlainTransport, ScriptedServer]]:
        if ours is not None:
            options["tls"] = trust(ours.authority.read_text())
        with ScriptedServer(replies, ours) as server:
            yield transports.to(server.port, **options), server

    return serve
