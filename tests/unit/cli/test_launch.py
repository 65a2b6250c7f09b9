"""The supervisor that `mount` starts before it knows what to mount."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from datastore.mounting import launch

ECHO = "import sys; sys.stderr.write('said'); sys.stdout.write(sys.stdin.read() or 'nothing')"


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[launch.Launched]]:
    monkeypatch.setattr(launch, "command", lambda: [sys.executable, "-c", ECHO])
    yield launch._begun
    while launch._begun:
        ended(launch._begun.pop())


def ended(launched: launch.Launched, told: bytes = b"") -> bytes:
    with launched.errors:
        answer, _ = launched.process.communicate(told, timeout=60)
        assert launched.said() == b"said"
    return answer


def test_the_spare_process_is_started_for_a_mount_and_used_once(begun: list[launch.Launched]) -> None:
    launch.begin(["mount", "file.yaml"])
    (first,) = begun
    assert launch.take() is first
    second = launch.take()
    assert second is not first
    assert ended(first, b"a mount") == b"a mount"
    assert ended(second) == b"nothing"


@pytest.mark.parametrize("words", [["mount", "--help"], ["mount", "f", "-h"], ["umount", "d"], [], ["status"]])
def test_other_commands_start_no_spare_process(words: list[str], begun: list[launch.Launched]) -> None:
    launch.begin(words)
    assert not begun


def test_a_spare_process_that_cannot_start_is_reported_by_the_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "command", lambda: ["/nonexistent"])
    launch.begin(["mount", "f"])
    with pytest.raises(FileNotFoundError):
        launch.take()


def test_a_supervisor_without_a_specification_ends_with_its_server() -> None:
    """Its server, which imports meanwhile, holds the same standard error: that ends when both have."""
    done = subprocess.run(
        [sys.executable, "-m", "datastore.fuse"], input=b"", capture_output=True, timeout=100, check=False
    )
    assert done.returncode != 0
    assert done.stdout == b""
