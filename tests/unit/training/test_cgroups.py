"""datastore.training.local.cgroups on a made-up hierarchy of v2 (S-329); the kernel's are in tests/training."""

from __future__ import annotations

from pathlib import Path

import pytest

from datastore.training.local.cgroups import Limits, parents
from tests.promises import promise


@promise("S-329")
def test_v2_is_limited_below_the_root_for_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    own = tmp_path / "own"
    own.write_text("0::/user.slice/session-1.scope\n")
    found = parents("default-digits", tmp_path, own)
    assert found.why_not == ""
    group = found.group("worker-0")
    group.make(Limits(processors=0.5, memory_bytes=1 << 20))
    (directory,) = group.directories
    assert directory == tmp_path / "datastore-jobs" / "0-default-digits" / "worker-0"
    assert (directory / "cpu.max").read_text() == "50000 100000"
    assert (directory / "memory.max").read_text() == str(1 << 20)
    assert (tmp_path / "datastore-jobs" / "cgroup.subtree_control").read_text() == "+cpu +memory"
    (directory / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (directory / "memory.current").write_text("5000")
    (directory / "memory.stat").write_text("anon 1\ninactive_file 2000\n")
    (directory / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert (group.cpu_s(), group.memory_bytes(), group.out_of_memory()) == (2.5, 3000, True)
    assert group.enter(["true"])[3] == str(directory)


@promise("S-329")
def test_where_nothing_can_be_written_there_are_no_limits_and_that_is_told(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/\n")
    found = parents("default-digits", tmp_path / "missing", own)
    assert found.why_not == "cgroups can't be written by this user (No such file or directory)"
    group = found.group("worker-0")
    group.make(Limits(processors=0.5))
    assert (group.cpu_s(), group.memory_bytes(), group.out_of_memory()) == (None, None, False)
    assert group.enter(["true"]) == ["true"]
