"""The uncommitted writes of all files of a mount, and what an earlier process of the mount may not have committed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from datastore.errors import StoreError

from ..fileserver import Kept
from .calls import Attributes
from .client import Client, Credentials
from .nodes import Node, Nodes
from .opened import Handle
from .paths import open_files
from .uncommitted import Uncommitted

T = TypeVar("T")
UNCOMMITTED_BYTES = 64 << 20
"""The most bytes, of all files, that are kept until the server commits them; beyond it a write commits its file."""


class Writes:
    """What the mount at this mountpoint writes."""

    def __init__(self, client: Client, nodes: Nodes, state: Path, mountpoint: str) -> None:
        self._client = client
        self._lock = nodes.lock
        self._mountpoint = mountpoint
        self._written: dict[Node, Uncommitted] = {}
        self._saved = state / "verifier"
        """The file of the verifier of this mount's last write, by which the next process sees if the server restarted
        since."""
        self._verifier: int | None = None

    def begin(self) -> None:
        """Begin a fresh mount."""
        self._saved.unlink(missing_ok=True)

    def resume(self, opened: Iterable[Handle]) -> None:
        """Doubt the earlier process' writes to the files that are open for writing."""
        self._verifier = int(self._saved.read_text()) if self._saved.exists() else None
        for handle in opened:
            if handle.flags & os.O_ACCMODE != os.O_RDONLY:
                self._begin(handle.node, handle.identity, self._verifier)

    def _begin(self, node: Node, identity: Credentials, doubt: int | None = None) -> Uncommitted:
        self._written[node] = node.uncommitted = uncommitted = Uncommitted(node.handle, identity, doubt)
        return uncommitted

    def write(self, node: Node, identity: Credentials, offset: int, content: bytes) -> Attributes | None:
        """Write to a file; return its attributes, if the server tells them."""
        with self._lock:
            uncommitted = node.uncommitted or self._begin(node, identity)
        written = uncommitted.write(self._client, identity, offset, content)
        if written.verifier != self._verifier:
            self._verifier = written.verifier
            temporary = self._saved.with_suffix(".new")
            temporary.write_text(str(written.verifier))
            temporary.replace(self._saved)
        return written.attributes

    def keep_to_limit(self, node: Node) -> None:
        """Commit this file's writes if more is kept than may be."""
        with self._lock:
            kept = sum(each.bytes for each in self._written.values())
        if kept > UNCOMMITTED_BYTES and node.uncommitted is not None:
            node.uncommitted.commit(self._client)

    def settled(self, node: Node, ask: Callable[[], T]) -> T:
        """Return the result of `ask` about a file, asked when all writes that a server restart lost are sent again."""
        while True:
            uncommitted, connection = node.uncommitted, self._client.reconnects
            if not uncommitted:
                return ask()
            if uncommitted.unsure(self._client):
                uncommitted.settle(self._client)
            answer = ask()
            if connection == self._client.reconnects:
                return answer

    def end(self, node: Node) -> None:
        """Forget a file's writes after its last close, unless it is open again."""
        with self._lock:
            if not node.opens:
                node.uncommitted = None
                self._written.pop(node, None)

    def commit_all(self) -> list[str]:
        """Have the server commit everything; return a line for each file that it did not commit."""
        with self._lock:
            written = list(self._written.items())
        failures: list[tuple[Node, Uncommitted, Exception]] = []
        silent = None
        for node, uncommitted in written:
            try:
                if silent is None:
                    uncommitted.settle(self._client)
            except StoreError as error:
                silent = error  # each other file would wait for the same timeout
            except OSError as error:
                failures.append((node, uncommitted, error))
            if silent is not None and uncommitted:
                failures.append((node, uncommitted, silent))
        self._learn_paths([(node, uncommitted) for node, uncommitted, _ in failures])
        return [f"{uncommitted.path or f'inode {node.ino}'}: {error}" for node, uncommitted, error in failures]

    def unstored(self, *, silent: bool) -> list[Kept]:
        """See FileServerFilesystem."""
        with self._lock:
            found = [(node, one) for node, one in self._written.items() if one and (silent or one.error)]
        self._learn_paths(found)
        return [Kept(one.path or f"inode {node.ino}", one.bytes, one.since, one.error) for node, one in found]

    def _learn_paths(self, files: Sequence[tuple[Node, Uncommitted]]) -> None:
        """Note the paths of these files, as far as they are known. That of a detached mount's file is not known."""
        named = open_files(self._mountpoint) if files else {}
        for node, uncommitted in files:
            uncommitted.path = named.get(node.ino, uncommitted.path)
