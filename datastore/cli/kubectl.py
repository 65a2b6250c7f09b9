"""The cluster through the user's own kubectl: its logins, contexts and proxies work here as they do there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from datastore.errors import DatastoreError, Unreachable

DEADLINE_S = 20.0
EVERYWHERE = "--all-namespaces"


class Forbidden(DatastoreError):
    """The user of kubectl's context may not do that."""


class Kubectl:
    """Runs kubectl; namespace '' is that of the context. Errors: Forbidden, DatastoreError with kubectl's words."""

    def __init__(self, namespace: str = "") -> None:
        self._namespace = namespace

    def get(self, kind: str, name: str = "", *, selector: str = "", namespace: str | None = None) -> Any:
        """An object, or a list of all (with a selector: of those); None when the one is not there."""
        arguments = ["get", kind, *([name] if name else []), "--output=json", "--ignore-not-found"]
        arguments += [f"--selector={selector}"] if selector else []
        text = self.run(*arguments, namespace=namespace)
        if not text.strip():
            return None if name else []
        found = json.loads(text)
        return found if name else found["items"]

    def raw(self, path: str) -> str:
        """What the API server, or what it is a proxy of, answers to a GET."""
        # With --request-timeout the path would get a query, which those behind the proxy take for another path.
        return _output(["kubectl", "get", "--raw", path])

    def run(self, *arguments: str, namespace: str | None = None) -> str:
        """Standard output of a kubectl command. namespace: another than ours; EVERYWHERE: all."""
        space = self._namespace if namespace is None else namespace
        where = [EVERYWHERE] if space == EVERYWHERE else [f"--namespace={space}"] if space else []
        return _output(["kubectl", *arguments, *where, "--request-timeout=10s"])


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except FileNotFoundError:
        raise DatastoreError("kubectl is not on PATH; install it, this asks the cluster through it") from None
    except subprocess.TimeoutExpired:
        raise Unreachable(f"kubectl {command[1]}: no answer from the cluster within {DEADLINE_S:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["failed"]
        refused = Forbidden if "(Forbidden)" in lines[-1] else DatastoreError
        raise refused(f"kubectl {command[1]}: {lines[-1]}")
    return done.stdout
