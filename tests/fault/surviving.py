"""A server that dies: as with kernel and supervisor, a new one takes over and gets the pending request again."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from datastore.fuse.kernel import abi
from datastore.fuse.kernel.dispatch import Header, Operation, call_again
from datastore.fuse.kernel.wire import CreateRequest
from datastore.fuse.ops import Caller, Filesystem
from tests.driving import resolve
from tests.fault.dying import Mortal
from tests.fault.worlds import FaultWorld
from tests.faulty import Plan, no_faults
from tests.mounted import Died

_AGAIN = {
    "create": abi.CREATE,
    "mkdir": abi.MKDIR,
    "mknod": abi.MKNOD,
    "symlink": abi.SYMLINK,
    "unlink": abi.UNLINK,
    "rmdir": abi.RMDIR,
    "rename": abi.RENAME2,
    "setxattr": abi.SETXATTR,
    "removexattr": abi.REMOVEXATTR,
}
"""Requests that succeed when they come again and find their effect already there."""


class Surviving:
    """Serves the methods of ops.Filesystem by the server that lives. plan_next: the faults of its successor."""

    def __init__(self, world: FaultWorld, mortal: Mortal, plan_next: Plan = no_faults) -> None:
        self._world, self._mortal, self._plan_next = world, mortal, plan_next
        self.found: Mapping[str, bytes] = {}
        """What was in the bucket when the server died."""
        self.recovery_calls = 0
        """How many store calls the new server makes before it serves."""
        self._requests = itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._world.fs, name)
        if not callable(method):
            return method

        def call(*arguments: Any) -> Any:
            if arguments and isinstance(arguments[0], Caller):
                arguments = (arguments[0]._replace(request=next(self._requests)), *arguments[1:])
            try:
                reply = getattr(self._world.fs, name)(*arguments)
                return resolve(reply) if inspect.iscoroutine(reply) else reply
            except Died:
                self.restart()
                return self._again(name, arguments)

        return call

    def restart(self) -> None:
        """Start a new server over the same state directory."""
        self.found = self._world.keys()
        self._mortal.bury(self._world)
        self._world.build(self._plan_next, resumed=True)
        self.recovery_calls = len(self._world.faulty.calls)

    def _again(self, name: str, arguments: tuple[Any, ...]) -> Any:
        fs = cast(Filesystem, self._world.fs)
        method = getattr(fs, name)
        if name not in _AGAIN:
            return resolve(method(*arguments))
        caller, parent = cast(Caller, arguments[0]), arguments[1]
        header: Header = (0, _AGAIN[name], 0, parent, caller.uid, caller.gid, caller.pid, 0, 0)
        given: Any = arguments[2:]
        if name == "create":
            given = CreateRequest(*given)
        return resolve(call_again(cast(Operation, SimpleNamespace(method=method)), header, (caller, parent), given, fs))
