"""Fixtures of every test: a clean environment, and a check that nothing is left behind.

HOME and the XDG directories are temporary, no credential or proxy of the person who runs the tests leaks in, and a
mount, thread or process that outlives its tests is a failure.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from tests.servers import authority, minio, moto, tools_dir, versitygw, versitygw_tls
from tests.tools.mounting import mounted_below

__all__ = ["authority", "minio", "moto", "versitygw", "versitygw_tls"]

LEAK_GRACE_S = 60.0
"""How long leftovers may take to end: a process that still imports its code ends only after that."""
LEAKING_PREFIXES = ("AWS_", "DATASTORE_", "S3_", "RCLONE_", "MINIO_")
PROXIES = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}
SESSION_MARK = "KUBE_DATASTORE_TEST_SESSION"

# In CI Hypothesis draws the same examples each time, as in its own CI profile, so that a new failure comes from the
# change that is tested. Elsewhere each run draws new examples.
ON_CI = os.environ.get("CI") == "true"
hypothesis.settings.register_profile("project", deadline=None, print_blob=True, derandomize=ON_CI)
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="session", autouse=True)
def clean_environment() -> Iterator[Path]:
    """Yield the temporary home. Its path is short, because that of a Unix socket has at most 107 bytes."""
    home = Path(tempfile.mkdtemp(prefix="ds-"))
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(LEAKING_PREFIXES) or name.lower() in PROXIES:
                patch.delenv(name)
        patch.setenv("KUBE_DATASTORE_TOOLS", str(tools_dir().parent))
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("HOME", str(home))
        for variable, folder in (("CACHE", ".cache"), ("CONFIG", ".config"), ("STATE", ".state"), ("DATA", ".data")):
            patch.setenv(f"XDG_{variable}_HOME", str(home / folder))
        (home / ".run").mkdir(mode=0o700)
        patch.setenv("XDG_RUNTIME_DIR", str(home / ".run"))
        yield home
    if not mounted_below(home):
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def nothing_stays_behind(clean_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail if mounts or processes outlive the session. This fixture is set up first, so that it checks last."""
    mark = uuid.uuid4().hex
    os.environ[SESSION_MARK] = mark
    yield
    roots = (clean_environment, tmp_path_factory.getbasetemp())
    deadline = time.monotonic() + LEAK_GRACE_S
    while (leaks := _leaks(roots, mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not leaks, f"left behind by the tests: {'; '.join(leaks)}"


@pytest.fixture(scope="module", autouse=True)
def no_thread_stays_behind(nothing_stays_behind: None) -> Iterator[None]:
    """Fail if threads outlive the module that started them."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + LEAK_GRACE_S
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(max(0.0, deadline - time.monotonic()))
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.is_alive() and not thread.daemon]
    assert not left, f"threads still run: {left}"


def _leaks(roots: tuple[Path, ...], mark: str) -> list[str]:
    mounts = [f"mount {mountpoint}" for root in roots for mountpoint in mounted_below(root)]
    return mounts + [f"process {told}" for told in _descendants(mark)]


def _descendants(mark: str) -> list[str]:
    """Return pid and name of the processes that inherited this session's mark, even if they detached themselves."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(SESSION_MARK) == mark
            ):
                found.append(f"{process.pid} {process.name()}")
    return found
