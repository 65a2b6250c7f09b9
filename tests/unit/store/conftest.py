"""The two ways to wait for a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from datastore.fuse.loop import now
from tests.authority import HERE, Authority, Identity
from tests.driving import resolve
from tests.unit.store.scripted import PlainTransport, Reply, ScriptedServer, Served, Transports, Wait, trusting


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
def shown(request: pytest.FixtureRequest) -> Identity | None:
    """What a server shows, in the clear and over TLS."""
    return cast("Identity", request.getfixturevalue("identity")) if request.param == "tls" else None


@pytest.fixture
def served(shown: Identity | None, transports: Transports) -> Served:
    """Makes a server of answers and a transport to it."""

    @contextmanager
    def serve(*replies: Reply | bytes, **options: Any) -> Iterator[tuple[PlainTransport, ScriptedServer]]:
        with ScriptedServer(replies, shown) as server:
            yield transports.to(server.port, **trusting(shown), **options), server

    return serve
