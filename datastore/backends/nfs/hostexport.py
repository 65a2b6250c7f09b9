"""Makes an export for each Datastore on an NFS host, by one script over SSH (hostscript.py): `provisioner: ssh`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from datastore.api.source import NFSLocation
from datastore.api.status import Capabilities
from datastore.backends import volumeprobe
from datastore.backends.base import Ensured, Identity, Measured, Owner, Policy, Released
from datastore.backends.nfs import hostscript
from datastore.backends.nfs.parameters import SSHParameters, limit
from datastore.backends.nfs.ssh import HostAddress, Hosts

LIMIT_S = 9.0
"""For one script; the controller gives a check of a backend ten seconds."""
NAME_MAX = 120
"""How much of a Datastore's name is in its directory's; the uid distinguishes names with the same beginning."""
_SQUASH = {"none": "no_root_squash", "root": "root_squash", "all": "all_squash"}


@cache
def script() -> str:
    """Return the text of the script, as it is sent to the host."""
    return Path(hostscript.__file__).read_text()


class HostExport:
    """See Backend. nodes, class_uid, made: see Opening (registry.py)."""

    def __init__(
        self,
        identity: Identity,
        parameters: SSHParameters,
        address: HostAddress,
        hosts: Hosts,
        nodes: Callable[[], Sequence[str]],
        *,
        capacity_bytes: int | None,
        class_uid: str,
        made: bool,
    ) -> None:
        self._identity = identity
        self._parameters = parameters
        self._address = address
        self._hosts = hosts
        self._nodes = nodes
        self._capacity_bytes = capacity_bytes
        self._class_uid = class_uid
        self._made = made

    def ensure(self) -> Ensured:
        """See Backend. One script makes the directory, its quota and its export.

        Errors: InvalidManifest without a capacity, unless the class has no quotas.
        """
        access = self._parameters.access
        uid, gid, mode = access.owner
        anonymous = f"anonuid={uid},anongid={gid}" if access.squash == "all" else ""
        options = ("rw", "sync", "no_subtree_check", _SQUASH[access.squash], anonymous, *self._parameters.options)
        answer = self._run(
            "ensure",
            {
                "namespace": self._identity.namespace,
                "name": self._identity.name,
                "class": self._class_uid,
                "capacity": limit(self._capacity_bytes) if self._parameters.quota else None,
                "clients": access.networks(self._nodes),
                "options": ",".join(filter(None, options)),
                "owner": uid,
                "group": gid,
                "mode": mode,
                "made": self._made,
            },
        )
        measured = Measured(objects=answer["files"], size_bytes=answer["bytes"]) if "files" in answer else None
        location = NFSLocation(server=self._parameters.server, path=str(answer["path"]))
        return Ensured(source=location, owner=Owner.THIS, measured=measured)

    def probe(self) -> Capabilities:
        """See Backend. Everything is tried on the host's own disk, since the server passes on what this disk can do."""
        answer = self._run("probe", {"program": Path(volumeprobe.__file__).read_text()})
        return Capabilities.model_validate(answer["capabilities"])

    def usage(self) -> Measured | None:
        """See Backend. With a quota ensure() returns the usage; without one, counting would read the whole tree."""
        return None

    def release(self, policy: Policy, go_on: Callable[[], bool]) -> Released:
        """See Backend. The export is withdrawn whatever the policy says."""
        message = "nothing was done yet"
        while go_on():
            answer = self._run("release", {"policy": policy.value})
            message = f"{self._address}: {answer['message']}"
            if answer["done"]:
                return Released(done=True, message=message)
        return Released(done=False, message=message)

    def _run(self, operation: str, more: Mapping[str, Any]) -> dict[str, Any]:
        request = {
            "operation": operation,
            "root": self._parameters.root,
            "directory": f"{self._identity.namespace}_{self._identity.name[:NAME_MAX]}_{self._identity.uid}",
            "uid": self._identity.uid,
            "quota": self._parameters.quota,
            **more,
        }
        return self._hosts.run(self._address, script(), request, LIMIT_S)
