"""A replica's process, which may end at any moment (S-331)."""

from __future__ import annotations

import os
from pathlib import Path

from datastore.cgroupfiles import Places
from datastore.training.local.cgroups import Group
from datastore.training.local.isolation import Container, Run
from datastore.training.local.processes import Process
from datastore.training.local.replica import Replica
from datastore.training.policy import State
from datastore.training.topology import Task
from tests.promises import promise


def replica_of(folder: Path, engine: Path) -> Replica:
    return Replica(
        task=Task(role="master", index=0),
        log_path=folder / "log",
        isolation=Container(engine=str(engine), shown={}, working_dir=None),
        group=Group(Places()),
    )


@promise("S-331")
def test_a_process_that_ends_just_before_it_is_killed(tmp_path: Path) -> None:
    """The launcher used to end with it, and the job was reported as one with a killed launcher."""
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\n[ $1 = run ] && exit 3\nexit 0\n")
    program.chmod(0o755)
    replica = replica_of(tmp_path, program)
    replica.start(Run(unique="a", job="a", command=["train"], variables={}, image="any"))
    assert replica._process is not None
    os.waitid(os.P_PID, replica._process.pid, os.WEXITED | os.WNOWAIT)  # not whatever another test left
    replica.kill()
    assert replica.reap()
    assert (replica.state, replica.exit_code) == (State.FAILED, 3)


@promise("S-334")
def test_the_cpu_time_of_processes_that_have_ended_stays(tmp_path: Path) -> None:
    """Without a cgroup it is the sum of those that live."""
    replica = replica_of(tmp_path, tmp_path / "engine")
    replica.sample([Process(pid=1, parent=0, cpu_s=1.5, memory_bytes=100)], None)
    replica.sample([], None)
    assert replica.meter.last is not None
    assert (replica.meter.last.cpu_s, replica.meter.last.memory_bytes) == (1.5, 0)
