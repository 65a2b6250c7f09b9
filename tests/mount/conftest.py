"""Mounts that tests share: one a module for each pair of server and transport, and a directory of it for each test."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.authority import Identity
from tests.mount.mounts import TTL, Area, Mount, mounted
from tests.mount.outages import Breakable, breakable
from tests.servers import Server, make_bucket

WAYS = ("versitygw-kernel", "minio-kernel", "versitygw-libfuse")
ONE_SERVER = ("versitygw-kernel", "versitygw-libfuse")
"""A module whose tests do not depend on what the server is says WAYS = ONE_SERVER."""
_numbers = itertools.count(1)

Mounter = Callable[..., AbstractContextManager[Mount]]
Breaking = Callable[..., AbstractContextManager[tuple[Breakable, Mount]]]


def new_bucket(server: Server) -> str:
    """A bucket of its own."""
    return make_bucket(server, f"bucket-{os.getpid()}-{next(_numbers)}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that use `way` run in each way of their module, but for those that say themselves in which."""
    own = any(mark.args[0] == "way" for mark in metafunc.definition.iter_markers("parametrize"))
    if "way" in metafunc.fixturenames and not own:
        ways = getattr(metafunc.module, "WAYS", WAYS)
        metafunc.parametrize("way", ways, indirect=True, scope="module")


@pytest.fixture(scope="module")
def way(request: pytest.FixtureRequest) -> tuple[Server, str]:
    """A running server, and who speaks to the kernel."""
    name, transport = request.param.split("-")
    server: Server = request.getfixturevalue(name)
    return server, transport


@pytest.fixture(scope="module")
def shared(way: tuple[Server, str], clean_environment: Path) -> Iterator[Mount]:
    """One mount for all tests of a module."""
    server, transport = way
    with mounted(server, new_bucket(server), clean_environment, transport, metadataTTL=TTL) as mount:
        yield mount


@pytest.fixture
def area(shared: Mount) -> Area:
    """A directory of the shared mount."""
    made = Area(shared, f"t{next(_numbers)}")
    made.path.mkdir()
    return made


@pytest.fixture(scope="module")
def other(shared: Mount, clean_environment: Path) -> Iterator[Mount]:
    """A second mount of the same bucket, as from another machine."""
    home = clean_environment
    with mounted(shared.server, shared.bucket, home, shared.transport, metadataTTL=TTL) as mount:
        yield mount


@pytest.fixture
def mount_with(versitygw: Server, clean_environment: Path) -> Mounter:
    """Make a mount of a new bucket of versitygw (or of `bucket`) for this test alone."""

    def make(bucket: str = "", server: Server | None = None, **options: Any) -> AbstractContextManager[Mount]:
        at = server or versitygw
        return mounted(at, bucket or new_bucket(at), clean_environment, **options)

    return make


@pytest.fixture
def breaking(versitygw: Server, clean_environment: Path, tmp_path: Path) -> Breaking:
    """Make a mount whose store the test takes away; it answers again at the end."""

    @contextmanager
    def make(identity: Identity | None = None, **spec: Any) -> Iterator[tuple[Breakable, Mount]]:
        folder = tmp_path / f"store{next(_numbers)}"
        folder.mkdir()
        with (
            breakable(str(folder), identity) as storage,
            mounted(storage.server, new_bucket(storage.server), clean_environment, **spec) as mount,
        ):
            try:
                yield storage, mount
            finally:
                storage.thaw()

    return make


@pytest.fixture(scope="session")
def has_rclone() -> None:
    """Skips where rclone is not installed; in CI that is a failure."""
    if shutil.which("rclone") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("rclone is not installed")
        pytest.skip("rclone is not installed")
