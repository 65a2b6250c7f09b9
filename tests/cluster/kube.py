"""kubectl for tests: objects as dicts, waits that end and that say, when they fail, what the cluster knows."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from datastore.errors import DatastoreError
from tests.cluster.apireader import api_reader
from tests.servers import tools_dir

COMMAND_TIMEOUT_S = 180.0
REMOVED_S = 420.0
"""For definitions: Kubernetes may fail to list the instances of one that goes, and looks again after five minutes."""
PATIENCE_S = 120.0
"""Of waits, unless said. It only ends those for what never comes."""
POLL_S, POLL_MOST_S = 0.2, 2.0
"""Between two looks. After one that took long, as a command does, it is twice as long."""
LOG_LINES = 40

Manifest = dict[str, Any]


class KubeError(Exception):
    """kubectl said no; the text is what it said."""


class NotInTime(Exception):
    """What was waited for did not come; the text ends with what the namespace holds and its pods say."""


@dataclass(frozen=True, slots=True)
class Kube:
    """One cluster as its administrator; every call names a namespace or takes 'default'. Errors: KubeError.

    also: namespaces that every failed wait tells of, such as the one the controller runs in.
    """

    kubeconfig: Path
    also: tuple[str, ...] = ()

    def kubectl(self, *arguments: str, given: str = "", timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """What `kubectl ARGUMENTS` printed; given: its standard input."""
        program = tools_dir() / "kubectl"
        command = [str(program) if program.exists() else "kubectl", *arguments]
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        done = subprocess.run(
            command, env=environment, input=given, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode != 0:
            raise KubeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def apply(self, *manifests: Manifest, namespace: str = "default", timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Server-side apply, all in one call."""
        text = yaml.safe_dump_all(manifests)
        self.kubectl(
            *("apply", "--server-side", "--field-manager=tests", "--force-conflicts"),
            *(f"--namespace={namespace}", "--filename=-"),
            given=text,
            timeout_s=timeout_s,
        )

    def apply_folder(self, folder: Path) -> None:
        """`kubectl apply -k`."""
        self.kubectl("apply", "--server-side", "--field-manager=tests", "--kustomize", str(folder))

    def get(self, kind: str, name: str, *, namespace: str = "default") -> Manifest | None:
        """The object, or None."""
        try:
            return api_reader(self.kubeconfig).get(kind, name, namespace)
        except DatastoreError as error:
            raise KubeError(f"get {kind} {name}: {error}") from None

    def items(self, kind: str, *, namespace: str = "default", selector: str = "") -> list[Manifest]:
        """All objects of a kind, or of `pods,services`, with these labels, in the namespace or in '' for all."""
        try:
            return api_reader(self.kubeconfig).items(kind, namespace, selector)
        except DatastoreError as error:
            raise KubeError(f"get {kind}: {error}") from None

    def patch(
        self, kind: str, name: str, change: Manifest, *, namespace: str = "default", subresource: str = ""
    ) -> None:
        """A JSON merge patch."""
        which = [f"--subresource={subresource}"] if subresource else []
        body = f"--patch={json.dumps(change)}"
        self.kubectl("patch", kind, name, f"--namespace={namespace}", "--type=merge", body, *which)

    def delete(self, kind: str, name: str, *, namespace: str = "default", wait: bool = True) -> None:
        """Delete the object; there may be none. wait: until it is gone."""
        waiting = f"--wait={str(wait).lower()}"
        self.kubectl("delete", kind, name, f"--namespace={namespace}", "--ignore-not-found", waiting)

    def logs(self, pod: str, *, namespace: str = "default", container: str = "", previous: bool = False) -> str:
        """What the pod's container printed."""
        which = [f"--container={container}"] if container else ["--all-containers"]
        return self.kubectl("logs", pod, f"--namespace={namespace}", *which, f"--previous={str(previous).lower()}")

    def tail(self, pod: str, lines: int = 1, *, namespace: str = "default") -> str:
        """The end of what the pod's only container printed."""
        try:
            return api_reader(self.kubeconfig).tail(pod, lines, namespace)
        except DatastoreError as error:
            raise KubeError(f"logs {pod}: {error}") from None

    def execute(self, pod: str, *command: str, namespace: str = "default", container: str = "") -> str:
        """What the command printed in the pod."""
        which = [f"--container={container}"] if container else []
        return self.kubectl("exec", pod, f"--namespace={namespace}", *which, "--", *command)

    def wait_for(
        self, what: str, done: Callable[[], bool], *, limit_s: float = PATIENCE_S, namespace: str = "default"
    ) -> float:
        """Ask until done, again also where kubectl got no answer; returns the seconds it took.

        Errors: NotInTime, with `diagnosis` of the namespace.
        """
        begun, said = time.monotonic(), ""
        while True:
            looked = time.monotonic()
            try:
                if done():
                    return time.monotonic() - begun
                said = ""
            except (KubeError, subprocess.TimeoutExpired) as error:
                said = f"; the last look: {error}"
            if time.monotonic() - begun > limit_s:
                found = "\n".join(self.diagnosis(each) for each in (namespace, *self.also))
                raise NotInTime(f"{what}: not within {limit_s:.0f} s{said}\n{found}")
            time.sleep(min(max(POLL_S, 2 * (time.monotonic() - looked)), POLL_MOST_S))

    def wait_phase(self, pod: str, phase: str, *, namespace: str = "default", limit_s: float = PATIENCE_S) -> float:
        """Wait until the pod is in the phase; a pod that failed instead is told at once."""

        def reached() -> bool:
            now = ((self.get("pod", pod, namespace=namespace) or {}).get("status") or {}).get("phase", "")
            if now == "Failed" != phase:
                raise NotInTime(f"pod {pod} failed\n{self.diagnosis(namespace)}")
            return bool(now == phase)

        return self.wait_for(f"pod {pod} {phase}", reached, limit_s=limit_s, namespace=namespace)

    def wait_condition(
        self, kind: str, name: str, condition: str, *, namespace: str = "default", limit_s: float = PATIENCE_S
    ) -> float:
        """Wait until the object's condition is True."""

        def met() -> bool:
            status = (self.get(kind, name, namespace=namespace) or {}).get("status") or {}
            given = {each["type"]: each["status"] for each in status.get("conditions") or []}
            return given.get(condition) == "True"

        return self.wait_for(f"{kind} {name} {condition}", met, limit_s=limit_s, namespace=namespace)

    def diagnosis(self, namespace: str) -> str:
        """What a person would look at first: objects, events, and the ends of the pods' logs."""
        scope = f"--namespace={namespace}"
        parts = [
            self._shown("get", "pods,jobs,pvc", scope, "--output=wide"),
            self._shown("get", "datastores.datastore.dev", scope, "--output=wide"),
            self._shown("get", "events", scope, "--sort-by=.lastTimestamp"),
        ]
        try:
            pods = self.items("pods", namespace=namespace)
        except KubeError as error:
            return "\n".join([*parts, str(error)])
        for pod in pods:
            name = pod["metadata"]["name"]
            logs = ("logs", name, scope, "--all-containers", "--prefix", f"--tail={LOG_LINES}")
            parts.append(self._shown(*logs))
            if any(each.get("restartCount") for each in pod["status"].get("containerStatuses", [])):
                parts.append(self._shown(*logs, "--previous"))
        return "\n".join(parts)

    def _shown(self, *arguments: str) -> str:
        try:
            return f"$ kubectl {' '.join(arguments)}\n{self.kubectl(*arguments)}"
        except (KubeError, subprocess.TimeoutExpired) as error:
            return str(error)
