"""A process that dies between any two of its lasting effects: store calls, journal, staging files, node log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from datastore.fuse.data.staging import StagedFile
from datastore.fuse.state.nodelog import NodeLog
from datastore.fuse.state.removed import RemovedFiles
from datastore.fuse.state.statedb import StateDb
from datastore.fuse.state.youngrows import YoungRows
from datastore.fuse.vfs import build
from datastore.fuse.vfs.filesystem import DatastoreFilesystem
from tests.driving import resolve
from tests.fault.scenarios import Scenario
from tests.fault.worlds import FaultWorld, fault_world
from tests.faulty import AtOnce, Fault
from tests.killing import HELD_S, quiet
from tests.mounted import Died

_LASTING = (
    (StateDb, "failed_unsent"),
    (StateDb, "upload_begun"),
    (StateDb, "upload_known"),
    (StateDb, "upload_ended"),
    (YoungRows, "_append"),
    (YoungRows, "clear"),
    (RemovedFiles, "record"),
    (RemovedFiles, "forget"),
    (NodeLog, "append"),
    (StagedFile, "write"),
)


class Mortal:
    """Counts the steps (lasting effects) of a process; from a chosen step on nothing has an effect any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        self._last: int | None = None
        self._after = False
        for owner, name in _LASTING:
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name), name.strip("_")))
        monkeypatch.setattr(StateDb, "_transaction", self._transaction(StateDb._transaction))
        monkeypatch.setattr(StagedFile, "close", self._close(StagedFile.close))
        self._begun: DatastoreFilesystem | None = None
        recover = build._recover

        async def recovering(core: Any, filesystem: DatastoreFilesystem, *, resumed: bool) -> None:
            self._begun = filesystem
            await recover(core, filesystem, resumed=resumed)

        monkeypatch.setattr(build, "_recover", recovering)

    @property
    def dead(self) -> bool:
        """Whether the process has died."""
        return self._last is not None and len(self.steps) > self._last

    def dies_at(self, world: FaultWorld, n: int | None, *, after: bool = False) -> None:
        """Let the process die before its n-th step from now; after: once that store call took effect. n None: never."""
        self.steps, self._last, self._after = [], n, after
        world.faulty.plan = AtOnce(self._plan)

    def steps_of(self, scenario: Scenario, directory: Path) -> list[str]:
        """Return the steps that a scenario has in a process that survives."""
        with fault_world(directory, scenario.before, mount=scenario.mount) as world:
            prepared = scenario.prepare(world.local)
            self.dies_at(world, None)
            scenario.act(world.local, prepared)
            return list(self.steps)

    def kills(self, world: FaultWorld, scenario: Scenario, n: int) -> None:
        """Run a scenario in a process that dies before its n-th step; the applications die too."""
        prepared = scenario.prepare(world.local)
        self.dies_at(world, n)
        with suppress(Died):
            scenario.act(world.local, prepared)
        self.bury(world)

    def bury(self, world: FaultWorld) -> None:
        """Release what the dead process held, as the kernel does. Nothing is recorded."""
        self._bury(world.fs)

    def bury_unborn(self) -> None:
        """Release what a process held that was killed during its recovery, before it served."""
        assert self._begun is not None
        self._bury(self._begun)

    def _bury(self, fs: DatastoreFilesystem) -> None:
        core = fs.core
        with suppress(Died):
            resolve(fs.upkeep.stop())
        quiet(HELD_S)
        self._last = None
        if core.cache is not None:
            core.cache.close()
        core.nodelog.close()
        core.db._young.close()
        core.db._connection.close()
        left = [node.staged for node in core.nodes.by_ino.values() if node.staged is not None]
        for staged in (*left, *(one.staged for one in fs.uploads.orphans.files.values())):
            staged.close(remove=False)

    def _plan(self, index: int, method: str) -> Fault | None:
        self._step(method)
        return Fault(Died(), after=True) if self.dead else None

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if self.dead and not (self._after and len(self.steps) == (self._last or 0) + 1):
            raise Died

    def _counted(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self._step(name)
            return method(*arguments, **options)

        return counted

    def _transaction(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def counted(*arguments: Any) -> Iterator[None]:
            self._step("transaction")
            with method(*arguments):
                yield

        return counted

    def _close(self, method: Callable[..., None]) -> Callable[..., None]:
        def counted(staged: StagedFile, *, remove: bool) -> None:
            if remove and staged.path.exists():
                self._step("unlink")
            method(staged, remove=remove)

        return counted
