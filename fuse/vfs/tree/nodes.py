"""The nodes that the kernel knows, and how their ids are chosen. No I/O.

A node id (inode number) is a hash of the parent's id and the name, so the same name has the same id at the next mount.
Where a live node has that id (another version of the same name is still open, or a collision), a new node takes the
next id of a fixed sequence.

INVARIANT: a node is reachable by its id until its lookup count is zero and no handle, staging file or child needs it.
INVARIANT: parent.children[name] is the live node of that name, or nothing; a node with `gone` is in no `children`.
INVARIANT: the `tail` of a directory ends with '/'; the root's key is the mount's prefix.
"""

from __future__ import annotations

import stat
from collections import OrderedDict
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from ...loop import Lock
from ...ops import ROOT_INO, Attr, Ino
from ...store.base import ETag, ObjectInfo, ObjectVersion
from .attrs import Attributes
from .listing import Listed, Listing, Stamp
from .names import BESIDE_DIRECTORY

if TYPE_CHECKING:
    from ...data.staging import StagedFile
    from .walk import Walk

NEVER = -1e9
"""A monotonic time before all others."""
_INO_BITS = 53
"""The bits of an id, which fits an IEEE double, so that tools that read numbers from JSON do not round it."""


class Change(NamedTuple):
    """A change of a name by this mount. when: monotonic seconds; listed: what the name has been since, or None."""

    when: float
    listed: Listed | None


class Node:
    """One file, link or special file. A task that awaits something while it works on the content holds `lock`. Only
    facts.py changes what is known of the object (the fields from `attributes` to `told`).
    """

    __slots__ = (
        "asked_at", "attributes", "attrs_valid", "changes", "etag", "gone", "handles", "ino", "leaving", "listed_kind",
        "lock", "lost", "made_at", "moves", "mtime_ns", "name", "nlookup", "pages_valid", "parent", "pinned", "racy",
        "size", "staged", "tail", "told", "unlinked_key", "writers",
    )  # fmt: skip

    def __init__(self, ino: Ino, parent: Directory | None, name: bytes, listed: Listed, attributes: Attributes) -> None:
        self.ino = ino
        self.parent = parent
        self.name = name
        self.tail = listed.tail
        self.listed_kind = listed.kind
        """The file type that the key alone shows: S_IFREG, S_IFDIR or S_IFLNK."""
        self.attributes = attributes
        self.attrs_valid = False
        """Whether `attributes` come from the object's metadata, of the version `etag`."""
        self.racy = False
        """Whether a listing without metadata can't confirm the attributes: they were learned or written within the
        second of LastModified, so that a later change may look the same, or came from a listing with metadata."""
        self.size = listed.size
        self.etag = listed.etag
        """'' while no object of this file exists."""
        self.mtime_ns = listed.mtime_ns
        """LastModified of the version `etag`."""
        self.asked_at = NEVER
        """When the store last confirmed this node by itself, without the stamp `told` (monotonic seconds)."""
        self.made_at = NEVER
        """When this mount wrote the known version (monotonic seconds); NEVER for a version of another client."""
        self.told: Stamp | None = None
        """The stamp of the listing or page that shows this version: what confirms the listing confirms this node."""
        self.nlookup = 0
        self.handles = 0
        self.writers = 0
        """How many of the handles may write."""
        self.moves = 0
        """How often the node was renamed or reattached."""
        self.changes = 0
        """How often this mount changed the object, which may leave its ETag as it was."""
        self.gone = False
        self.lost = False
        """Whether it is gone because another client took its name; a write takes the name back (last close wins)."""
        self.leaving = False
        """Set while this mount removes or replaces the node without keeping its bytes: an open waits for the lock."""
        self.pages_valid = False
        """Whether the kernel's pages, if any, are of this version."""
        self.pinned = False
        """Whether the kernel got bytes of this version, or a handle may write: open handles stay on it (S-147)."""
        self.staged: StagedFile | None = None
        self.lock = Lock()
        self.unlinked_key = ""
        """The key of the copy that was made when the name was removed while open; '' if there is none."""

    @property
    def checked_at(self) -> float:
        """When the store last confirmed this node, by itself or in a listing (monotonic seconds)."""
        return self.asked_at if self.told is None else max(self.asked_at, self.told.at)

    def is_version(self, seen: Listed | ObjectInfo) -> bool:
        """Whether the store shows the known version. Times are compared by seconds: a HEAD shows no fractions."""
        return seen.etag == self.etag and seen.mtime_ns // 1_000_000_000 == self.mtime_ns // 1_000_000_000

    @property
    def kind(self) -> int:
        """The file type, as in stat.S_IFREG."""
        return stat.S_IFMT(self.attributes.mode)

    @property
    def key(self) -> str:
        """The whole key of the object; for a directory also the prefix of its entries' keys."""
        if self.unlinked_key:
            return self.unlinked_key
        key, above = self.tail, self.parent
        while above is not None:
            key, above = above.tail + key, above.parent
        return key

    @property
    def name_key(self) -> str:
        """The key that belongs to the name, also when the bytes were copied to `unlinked_key`."""
        return self.key if self.parent is None else self.parent.key + self.tail

    @property
    def place(self) -> tuple[int, ...]:
        """A value that differs after each rename of the node or of a directory above, even if the key is as before."""
        return (self.ino, self.moves, *(self.parent.place if self.parent is not None else ()))

    @property
    def asked_as(self) -> tuple[tuple[int, ...], ETag, int]:
        """A value to compare before and after asking the store: if it differs, the answer may be outdated."""
        return self.place, self.etag, self.changes

    @property
    def path(self) -> bytes:
        """Path from the root of the mount, for messages."""
        above = self.parent.path if self.parent is not None else b""
        return above + b"/" + self.name if above else self.name

    @property
    def dirty(self) -> bool:
        """Whether the node has bytes that are not in the store."""
        return self.staged is not None and self.staged.dirty

    @property
    def cut_off(self) -> bool:
        """Whether another client took its name, or that of a directory above; False if this mount removed the node."""
        node: Node = self
        while node.parent is not None:
            if node.gone:
                return self.lost or self is not node
            node = node.parent
        return False

    @property
    def unknown(self) -> bool:
        """Whether an earlier server made the node, and the store has not been asked about it since."""
        return not (self._asked or self.gone or self.parent is None)

    @property
    def replaced_before(self) -> bool:
        """Whether an earlier server made the node, and another node had its name by then: nothing is known of it."""
        return self.gone and not self._asked

    @property
    def _asked(self) -> bool:
        return self.attrs_valid or self.staged is not None or self.checked_at != NEVER

    def holds_unsent(self) -> bool:
        """Whether the node, or a node below it, has bytes that are not in the store."""
        return self.dirty

    def attr(self) -> Attr:
        """Return what stat(2) shows."""
        mode, uid, gid, atime_ns, mtime_ns, ctime_ns, _, extra, _, _ = self.attributes
        device = self.attributes.device if extra else 0
        return Attr(self.ino, mode, self.size, self.nlink, uid, gid, atime_ns, mtime_ns, ctime_ns, device)

    @property
    def nlink(self) -> int:
        """The link count: 1 while the node has its name, 0 after."""
        return 0 if self.gone else 1

    def as_listed(self) -> Listed:
        """Return the entry that a listing would have of this node."""
        return Listed(self.listed_kind, self.tail, self.size, self.etag, self.mtime_ns)

    def version(self) -> ObjectVersion:
        """The version whose bytes this file has."""
        return ObjectVersion(self.key, self.etag, self.size)


class Directory(Node):
    """A directory and what is known of its entries."""

    __slots__ = (
        "changed", "children", "large", "list_s", "listing", "listing_lock", "listings_dropped", "marker", "probe_s",
        "subdirectories", "walk", "way",
    )  # fmt: skip

    def __init__(self, ino: Ino, parent: Directory | None, name: bytes, listed: Listed, attributes: Attributes) -> None:
        super().__init__(ino, parent, name, listed, attributes)
        self.children: dict[bytes, Node] = {}
        self.listing: Listing | None = None
        self.listing_lock = Lock()
        """Held while the directory is listed, so that it is listed once."""
        self.listings_dropped = 0
        """How often forget_listing() was called: a listing requested before the last call is not used."""
        self.changed: OrderedDict[bytes, Change] = OrderedDict()
        """The names that this mount changed, oldest first: a listing that began earlier does not show the change."""
        self.marker = False
        """Whether the directory's marker object is known to exist."""
        self.large = False
        """Whether it has more than a few pages: names are looked up one by one until that took as long as a listing."""
        self.list_s = 0.0
        """How long the last whole listing took, or a guess from its first pages; seconds."""
        self.probe_s = 0.0
        """How long requests for single names have taken since then, in all; seconds."""
        self.subdirectories = -1
        """The number of subdirectories, known since the directory was first listed; -1 before."""
        self.walk: Walk | None = None
        """The walk of a process through the subdirectories, if there was one."""
        self.way = b""
        """The name of the subdirectory that the last path through this directory led to."""

    @property
    def nlink(self) -> int:
        """2 and 1 for each subdirectory; 1, as on btrfs, while their number is not known (find(1) relies on this)."""
        return 0 if self.gone else 1 if self.subdirectories < 0 else 2 + self.subdirectories

    @property
    def listed_as(self) -> tuple[tuple[int, ...], int]:
        """A value to compare before and after a listing request: if it differs, the answer may be wrong."""
        return self.place, self.listings_dropped

    def forget_listing(self) -> None:
        """Drop the listing, and ignore the answers of pending listing requests."""
        self.listing = None
        self.listings_dropped += 1

    def has_directory(self, name: bytes) -> bool:
        """Whether this name is known to be a directory."""
        listed = self.listing.entries.get(name) if self.listing is not None else None
        return isinstance(self.children.get(name), Directory) or (listed is not None and listed.kind == stat.S_IFDIR)

    def holds_unsent(self) -> bool:
        """Whether a file below has bytes that are not in the store."""
        return any(child.holds_unsent() for child in self.children.values())


class NodeTable:
    """All nodes, by id."""

    def __init__(self, root_key: str, attributes: Attributes) -> None:
        self.root = Directory(ROOT_INO, None, b"", Listed(stat.S_IFDIR, root_key), attributes)
        self.root.nlookup = 1
        self.root.attrs_valid = not root_key  # the root of a whole bucket has no object with attributes
        self.by_ino: dict[int, Node] = {ROOT_INO: self.root}
        self.used: OrderedDict[int, Directory] = OrderedDict()
        """Directories by the time of their last readdir or lookup, least recently used first."""
        self.staged: set[Node] = set()
        """The nodes with a staging file, and some that had one since unsent() was last called."""
        self.grown = 0
        """How many nodes were made and entries listed since the reclaimer last checked."""
        self.dropped: list[int] = []
        """The ids of dropped nodes that the log of node ids may still have."""

    def unsent(self) -> dict[Node, StagedFile]:
        """Return the nodes that have a name and bytes not in the store. The time grows with the staging files."""
        staged = {node: node.staged for node in self.staged if node.staged is not None}
        self.staged = set(staged)
        return {node: file for node, file in staged.items() if file.dirty and not node.gone}

    def use(self, directory: Directory) -> None:
        """Note that a directory is read, or that a name is looked up in it."""
        self.used[directory.ino] = directory
        self.used.move_to_end(directory.ino)

    def free_ino(self, parent: Ino, name: bytes) -> Ino:
        """Return the id for a new node of this name."""
        for turn in count():
            digest = blake2b(b"%d/%d/" % (parent, turn) + name, digest_size=8).digest()
            ino = Ino(int.from_bytes(digest, "little") >> (64 - _INO_BITS))
            if ino > ROOT_INO and ino not in self.by_ino:
                break
        return ino

    def add(
        self, parent: Directory, name: bytes, listed: Listed, attributes: Attributes, ino: Ino | None = None
    ) -> Node:
        """Make the node of a name; a node that has the name loses it. ino: the id that it had in an earlier server."""
        if name in parent.children:
            self.detach(parent.children[name])
        make = Directory if listed.kind == stat.S_IFDIR else Node
        node = make(ino or self.free_ino(parent.ino, name), parent, name, listed, attributes)
        self.grown += 1
        self.used.setdefault(parent.ino, parent)
        self.by_ino[node.ino] = parent.children[name] = node
        return node

    def detach(self, node: Node) -> None:
        """Take a node out of its directory: it was removed, or another version took its name."""
        node.gone = True
        _take_out(node)
        self.drop_unused(node)

    def reattach(self, node: Node) -> bool:
        """Give a node that was cut off its name back, and its directories theirs; the node with the name by now loses
        it. Return False, with nothing changed, when that node has unsent bytes or is a directory.
        """
        parent = node.parent
        if parent is None or not node.cut_off:
            return True
        above = parent.parent
        twin = above.children.get(parent.name) if above is not None and parent.gone else None
        target = twin if isinstance(twin, Directory) and twin.tail == parent.tail else parent
        name = node.name
        if target.has_directory(name) and not isinstance(node, Directory):
            name += BESIDE_DIRECTORY
        holder = target.children.get(name)
        if holder is not None and holder is not node and (holder.dirty or isinstance(holder, Directory)):
            return False
        if target is parent and not self.reattach(parent):
            return False
        self._displace(holder, node)
        if parent is not target:
            _take_out(node)
        node.parent, node.name, node.gone, node.lost = target, name, False, False
        node.moves += 1
        if self.by_ino.get(node.ino) is not node:
            self.used.pop(node.ino, None)
            node.ino = self.free_ino(target.ino, node.name)
            self.by_ino[node.ino] = node
        target.children[node.name] = node
        target.forget_listing()
        return True

    def move(self, node: Node, parent: Directory, name: bytes, tail: str) -> None:
        """Rename a node. A node that has the target name, because a lookup saw the copy too early, loses it."""
        _take_out(node)
        self._displace(parent.children.get(name), node)
        node.moves += 1
        node.parent, node.name, node.tail = parent, name, tail
        if self.by_ino.get(node.ino) is node:  # else it was forgotten, after the rename call was interrupted
            parent.children[name] = node

    def _displace(self, holder: Node | None, by: Node) -> None:
        if holder is not None and holder is not by:
            holder.lost = True
            self.detach(holder)

    def forget(self, ino: int, nlookup: int) -> None:
        """Subtract `nlookup` from a node's lookup count (FORGET); unknown ids are ignored."""
        if (node := self.by_ino.get(ino)) is not None:
            node.nlookup = max(0, node.nlookup - nlookup)
            self.drop_unused(node)

    def drop_unused(self, node: Node) -> None:
        """Remove a node, and then its parents, as far as nothing needs them."""
        current: Node | None = node
        while current is not None and current is not self.root:
            used = current.nlookup or current.handles or current.staged is not None
            if used or (isinstance(current, Directory) and current.children):
                return
            if self.by_ino.get(current.ino) is current:  # a later node of the name may have the same id
                self.dropped.append(self.by_ino.pop(current.ino).ino)
                self.used.pop(current.ino, None)
            _take_out(current)
            current = current.parent


def _take_out(node: Node) -> None:
    """Remove a node's name from its directory, unless another node has that name."""
    if node.parent is not None and node.parent.children.get(node.name) is node:
        del node.parent.children[node.name]
