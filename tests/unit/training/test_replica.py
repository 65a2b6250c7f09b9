"""A replica's process, which may end at any moment (S-331)."""

from __future__ import annotations

import os
from pathlib import Path

from datastore.cgroupfiles import Places
from datastore.training.local.cgroups import Group
from datastore.training.local.isolation import Container, Run
from datastore.training.local.replica import Replica
from datastore.training.policy import State
from datastore.training.topology import Task
from tests.promises import promise


@promise("S-331")
def test_a_process_that_ends_just_before_it_is_killed(tmp_path: Path) -> None:
    """The launcher used to end with it, and the job was reported as one with a killed launcher."""
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\n[ $1 = run ] && exit 3\nexit 0\n")
    program.chmod(0o755)
    replica = Replica(
        task=Task(role="master", index=0),
        log_path=tmp_path / "log",
        isolation=Container(engine=str(program), shown={}, working_dir=None),
        group=Group(Places()),
    )
    replica.start(Run(unique="a", job="a", command=["train"], variables={}, image="any"))
    assert replica._process is not None
    os.waitid(os.P_PID, replica._process.pid, os.WEXITED | os.WNOWAIT)  # not whatever another test left
    replica.kill()
    assert replica.reap()
    assert (replica.state, replica.exit_code) == (State.FAILED, 3)
