"""The nodes that the kernel knows, and how their ids are chosen. No I/O.

A node id is a hash of the parent's id and the name, so the same name has the same id at the next mount; where that id
is taken by a node that lives (another version of the same name is still open, or a collision) the next in a fixed
sequence.

INVARIANT: a node is reachable by its id until its lookup count is zero, nothing holds it open and no unsent bytes
hang on it.
INVARIANT: parent.children[name] is the live node of that name, or nothing; a node with `gone` is in no `children`.
INVARIANT: `tail` of a directory ends with '/'; root's key is the mount's prefix.
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
"""Ids fit an IEEE double, so that tools which read JSON keep them."""


class Change(NamedTuple):
    """What we did to a name: when (monotonic seconds), and what is there since; None: nothing."""

    when: float
    listed: Listed | None


class Node:
    """One file, link or special file. `lock` is for whoever waits while he works on its content. What is known of its
    object (attributes to told) is changed by facts.py only.
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
        """What the key alone says: S_IFREG, S_IFDIR or S_IFLNK."""
        self.attributes = attributes
        self.attrs_valid = False
        """attributes come from the object's metadata, of the version `etag`."""
        self.racy = False
        """They were learned in the very second of that version: a later change may look the same in a listing."""
        self.size = listed.size
        self.etag = listed.etag
        """'' while no object of this file exists."""
        self.mtime_ns = listed.mtime_ns
        """LastModified of that version."""
        self.asked_at = NEVER
        """Monotonic seconds at which the store last said this for itself, and not by what `told` stands for."""
        self.made_at = NEVER
        """Monotonic seconds at which this mount wrote the version that is known; NEVER of another client's."""
        self.told: Stamp | None = None
        """Of the listing that has confirmed all this: as long as the store shows that listing, it shows this."""
        self.nlookup = 0
        self.handles = 0
        self.writers = 0
        """Those of the handles that may write."""
        self.moves = 0
        """How often it was renamed."""
        self.changes = 0
        """How often we changed its object, which may leave its ETag as it was."""
        self.gone = False
        self.lost = False
        """It is gone because another client took its name: a write takes the name back (the last close wins)."""
        self.leaving = False
        """We remove or replace it and its bytes are not kept: an open waits for the node's lock, and so for the end."""
        self.pages_valid = False
        """The kernel's pages, if any, are of this version."""
        self.pinned = False
        """The kernel was given bytes of it, or somebody may write to it: open handles stay on this version (S-147)."""
        self.staged: StagedFile | None = None
        self.lock = Lock()
        self.unlinked_key = ""
        """Where the bytes went when the name was removed while open, '' if nowhere."""

    @property
    def checked_at(self) -> float:
        """Monotonic seconds at which the store last confirmed all this, by itself or in a listing."""
        return self.asked_at if self.told is None else max(self.asked_at, self.told.at)

    def is_version(self, seen: Listed | ObjectInfo) -> bool:
        """Whether the store shows the version that is known. By seconds: a HEAD tells no parts of them."""
        return seen.etag == self.etag and seen.mtime_ns // 1_000_000_000 == self.mtime_ns // 1_000_000_000

    @property
    def kind(self) -> int:
        """The file type, as stat.S_IFREG."""
        return stat.S_IFMT(self.attributes.mode)

    @property
    def key(self) -> str:
        """The object's whole key; of a directory the prefix of what is in it."""
        if self.unlinked_key:
            return self.unlinked_key
        key, above = self.tail, self.parent
        while above is not None:
            key, above = above.tail + key, above.parent
        return key

    @property
    def name_key(self) -> str:
        """The key of its name, also when its bytes went to a hidden one."""
        return self.key if self.parent is None else self.parent.key + self.tail

    @property
    def place(self) -> tuple[int, ...]:
        """What is another after every rename of it or of a directory above, also when the key is the old one again."""
        return (self.ino, self.moves, *(self.parent.place if self.parent is not None else ()))

    @property
    def asked_as(self) -> tuple[tuple[int, ...], ETag, int]:
        """What is another when an answer about its object that was asked for before may be older than what is known."""
        return self.place, self.etag, self.changes

    @property
    def path(self) -> bytes:
        """Path from the root of the mount, for messages."""
        above = self.parent.path if self.parent is not None else b""
        return above + b"/" + self.name if above else self.name

    @property
    def dirty(self) -> bool:
        """Whether bytes of it are not in the store."""
        return self.staged is not None and self.staged.dirty

    @property
    def cut_off(self) -> bool:
        """Whether another client took its name, or that of a directory above; not when we removed it ourselves."""
        node: Node = self
        while node.parent is not None:
            if node.gone:
                return self.lost or self is not node
            node = node.parent
        return False

    @property
    def unknown(self) -> bool:
        """Handed out by a server that died, and the store was not asked about it since."""
        asked = self.attrs_valid or self.staged is not None or self.checked_at != NEVER
        return not (asked or self.gone or self.parent is None)

    def holds_unsent(self) -> bool:
        """Whether bytes of it, or below it, are not in the store."""
        return self.dirty

    def attr(self) -> Attr:
        """What stat shows."""
        mode, uid, gid, atime_ns, mtime_ns, ctime_ns, _, extra, _, _ = self.attributes
        device = self.attributes.device if extra else 0
        return Attr(self.ino, mode, self.size, self.nlink, uid, gid, atime_ns, mtime_ns, ctime_ns, device)

    @property
    def nlink(self) -> int:
        """Link count: one name, or none any more."""
        return 0 if self.gone else 1

    def as_listed(self) -> Listed:
        """How a listing would show it."""
        return Listed(self.listed_kind, self.tail, self.size, self.etag, self.mtime_ns)

    def version(self) -> ObjectVersion:
        """The version whose bytes this file has."""
        return ObjectVersion(self.key, self.etag, self.size)


class Directory(Node):
    """A directory and what is known of its entries."""

    __slots__ = (
        "changed", "children", "large", "list_s", "listing", "listing_lock", "listings_dropped", "marker", "probe_s",
        "stand_ins", "subdirectories", "walk",
    )  # fmt: skip

    def __init__(self, ino: Ino, parent: Directory | None, name: bytes, listed: Listed, attributes: Attributes) -> None:
        super().__init__(ino, parent, name, listed, attributes)
        self.children: dict[bytes, Node] = {}
        self.listing: Listing | None = None
        self.listing_lock = Lock()
        """Held while the directory is listed, so that it is listed once."""
        self.listings_dropped = 0
        """How often forget_listing() was called: a listing that was under way then is not to be believed."""
        self.changed: OrderedDict[bytes, Change] = OrderedDict()
        """Names we changed, in the order of that: a listing begun earlier does not know."""
        self.marker = False
        """Whether the directory's marker object is known to exist."""
        self.stand_ins: dict[str, tuple[ETag, int]] = {}
        """Tails of objects that stand for a directory of their name (S-165): the version and second of each."""
        self.large = False
        """More than a few pages of entries: names are looked up one by one until that has cost as much as a listing."""
        self.list_s = 0.0
        """What the last whole listing took, or a guess from its first pages; seconds."""
        self.probe_s = 0.0
        """What single look-ups took since; seconds."""
        self.subdirectories = -1
        """How many there were when it was last listed; -1: it never was."""
        self.walk: Walk | None = None
        """How a process goes through its subdirectories, if one does."""

    @property
    def nlink(self) -> int:
        """2 and one for each subdirectory; 1, as on btrfs, while their number is not known (find(1) relies on it)."""
        return 0 if self.gone else 1 if self.subdirectories < 0 else 2 + self.subdirectories

    @property
    def listed_as(self) -> tuple[tuple[int, ...], int]:
        """What is another when something that is being listed may be wrong."""
        return self.place, self.listings_dropped

    def forget_listing(self) -> None:
        """What was listed, or is being listed, may be wrong."""
        self.listing = None
        self.listings_dropped += 1

    def stood_in(self) -> bool:
        """Whether another object stands for this directory: `dir`, beside or in place of `dir/`."""
        return self.parent is not None and self.tail[:-1] in self.parent.stand_ins

    def has_directory(self, name: bytes) -> bool:
        """Whether this name is a directory, as far as is known."""
        listed = self.listing.entries.get(name) if self.listing is not None else None
        return isinstance(self.children.get(name), Directory) or (listed is not None and listed.kind == stat.S_IFDIR)

    def holds_unsent(self) -> bool:
        """Whether bytes of a file below are not in the store."""
        return any(child.holds_unsent() for child in self.children.values())


class NodeTable:
    """All nodes, by id."""

    def __init__(self, root_key: str, attributes: Attributes) -> None:
        self.root = Directory(ROOT_INO, None, b"", Listed(stat.S_IFDIR, root_key), attributes)
        self.root.nlookup = 1
        self.root.attrs_valid = not root_key  # the root of a whole bucket is no object that could tell them
        self.by_ino: dict[int, Node] = {ROOT_INO: self.root}
        self.used: OrderedDict[int, Directory] = OrderedDict()
        """Directories by the time at which they were last read or looked into, the longest ago first."""
        self.staged: set[Node] = set()
        """Those that have a staging file, and some that had one when unsent() was last called."""
        self.grown = 0
        """Nodes made and entries listed since the memory in use was looked at."""
        self.dropped: list[int] = []
        """Nodes that are no more and that the log of node ids may still have."""

    def unsent(self) -> list[Node]:
        """Those that have a name and bytes that are not in the store; takes as long as there are staging files."""
        self.staged = {node for node in self.staged if node.staged is not None}
        return [node for node in self.staged if node.dirty and not node.gone]

    def use(self, directory: Directory) -> None:
        """It is read, or a name is looked up in it."""
        self.used[directory.ino] = directory
        self.used.move_to_end(directory.ino)

    def free_ino(self, parent: Ino, name: bytes) -> Ino:
        """The id for a new node of this name."""
        for turn in count():
            digest = blake2b(b"%d/%d/" % (parent, turn) + name, digest_size=8).digest()
            ino = Ino(int.from_bytes(digest, "little") >> (64 - _INO_BITS))
            if ino > ROOT_INO and ino not in self.by_ino:
                break
        return ino

    def shown_ino(self, parent: Directory, name: bytes) -> Ino:
        """The id that readdir shows for a name: of its node, or the one it would get."""
        child = parent.children.get(name)
        return child.ino if child is not None else self.free_ino(parent.ino, name)

    def add(
        self, parent: Directory, name: bytes, listed: Listed, attributes: Attributes, ino: Ino | None = None
    ) -> Node:
        """Make the node of a name; the name must have none."""
        make = Directory if listed.kind == stat.S_IFDIR else Node
        node = make(ino or self.free_ino(parent.ino, name), parent, name, listed, attributes)
        self.grown += 1
        self.used.setdefault(parent.ino, parent)
        self.by_ino[node.ino] = parent.children[name] = node
        return node

    def restore(self, ino: Ino, parent: Directory, name: bytes, listed: Listed, attributes: Attributes) -> None:
        """Make the node that an earlier process had; the kernel holds one reference, at least. Of two of one name the
        later has it.
        """
        if name in parent.children:
            self.detach(parent.children[name])
        node = self.add(parent, name, listed, attributes, ino)
        node.nlookup, node.pinned = 1, True

    def detach(self, node: Node) -> None:
        """Take a node out of its directory: it was removed, or another version took its name."""
        node.gone = True
        _take_out(node)
        self.drop_unused(node)

    def reattach(self, node: Node) -> bool:
        """Give a node that was cut off its name again, and its directories theirs; who has the name by now loses it.
        False, and nothing has changed, when that is in use here.
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
        """Rename. Who has the target name, because a look-up saw the copies before we were done, loses it."""
        _take_out(node)
        self._displace(parent.children.get(name), node)
        node.moves += 1
        node.parent, node.name, node.tail = parent, name, tail
        if self.by_ino.get(node.ino) is node:  # else forgotten: nobody waits for a rename that was interrupted
            parent.children[name] = node

    def _displace(self, holder: Node | None, by: Node) -> None:
        if holder is not None and holder is not by:
            holder.lost = True
            self.detach(holder)

    def forget(self, ino: int, nlookup: int) -> None:
        """The kernel gives up references; unknown ids are ignored."""
        if (node := self.by_ino.get(ino)) is not None:
            node.nlookup = max(0, node.nlookup - nlookup)
            self.drop_unused(node)

    def drop_unused(self, node: Node) -> None:
        """Remove a node, and then its parents, when nothing needs them."""
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
    """Its directory has the name no more, if it is this node's."""
    if node.parent is not None and node.parent.children.get(node.name) is node:
        del node.parent.children[node.name]
