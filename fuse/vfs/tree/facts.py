"""What is known of a node: the version of its object, its attributes, and when the store confirmed them.

Only this module changes these fields. Each function stands for one reason: the store has listed the object or answered
a HEAD, this mount has written the object or changed its attributes, or the store must be asked again.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...state.attributes import is_racy
from ...store.base import ETag, ObjectInfo, WriteResult
from ...store.packed import unpacked
from .attrs import Attributes, from_metadata
from .core import Core
from .listing import Listed, Listing
from .nodes import NEVER, Directory, Node

_SECOND_NS = 1_000_000_000
_NOT_SAID = Attributes(0, 0, 0, 0, 0, 0)
"""The attributes of a node while adopted() makes it."""

# -- the store said it


def adopted(core: Core, parent: Directory, name: bytes, shown: Listed, checked_at: float) -> Node:
    """Make the node of a name that a listing or a probe shows. The name must have no node yet."""
    node = core.nodes.add(parent, name, shown, _NOT_SAID)
    node.asked_at = checked_at
    _follow_listing(core, node)
    _take_listed(core, node, shown)
    if node.attributes is _NOT_SAID:
        node.attributes = core.settings.defaults.of(shown.kind, shown.mtime_ns or parent.attributes.mtime_ns)
    return node


def listed(core: Core, node: Node, shown: Listed, checked_at: float) -> None:
    """Take in that a listing or a probe shows the object of a node, in the known version or another one."""
    if isinstance(node, Directory) and core.settings.full_attributes:
        # A listing shows that the directory exists, but not whether the attributes of its marker are still the same.
        return
    known_at = node.checked_at
    node.asked_at, node.told = max(known_at, checked_at), None
    if not isinstance(node, Directory):
        newer = not node.attrs_valid or known_at <= checked_at
        if not node.is_version(shown):
            replaced(core, node, shown.etag, shown.size, shown.mtime_ns)
            _take_listed(core, node, shown)
        elif (shown.said is not None and newer) or (node.racy and node.attrs_valid):
            node.attrs_valid = False
            _take_listed(core, node, shown)
    _follow_listing(core, node)


def listed_itself(core: Core, directory: Directory, listing: Listing) -> None:
    """Take a directory's attributes from its own listing, if that shows no marker or one whose metadata is known."""
    own = listing.own
    if own is None:
        if listing.entries and not listing.marker and directory.parent is not None:
            without_marker(core, directory, listing.listed_at)
            directory.told = listing.stamp
        return
    known = core.known.known(own.key, own.etag, own.mtime_ns) if own.said is None else unpacked(own.said)
    if known is not None:
        mtime_ns = own.mtime_ns // _SECOND_NS * _SECOND_NS
        headed(core, directory, ObjectInfo(own.key, 0, own.etag, mtime_ns, 0, known[0], known[1]))
        directory.racy, directory.asked_at, directory.told = False, listing.listed_at, listing.stamp


def recalled(core: Core, node: Node) -> None:
    """Take the attributes from AttributeMemory (the defaults, without full attributes). Unsent changes stay."""
    if node.dirty:
        return
    if not core.settings.full_attributes:
        node.attributes = core.settings.defaults.of(node.listed_kind, node.mtime_ns)
        return
    known = core.known.known(node.key, node.etag, node.mtime_ns)
    if known is not None:
        _describe(core, node, *known)
        node.racy = False
        _follow_listing(core, node)


def headed(core: Core, node: Node, info: ObjectInfo) -> None:
    """Take in a HEAD of the node's object."""
    if isinstance(node, Directory):
        node.marker = True
        node.etag, node.size = info.etag, 0
    else:
        # A store may have reported a wrong size for this ETag while others wrote the object. A link's size is its
        # target's.
        if not node.is_version(info) or (node.size != info.size and node.attributes.target is None):
            replaced(core, node, info.etag, info.size, info.mtime_ns)
    node.mtime_ns = info.mtime_ns
    _describe(core, node, info.metadata, info.content_type)
    node.racy = is_racy(info)
    node.asked_at, node.told = core.clock.monotonic(), None
    _follow_listing(core, node)


def without_marker(core: Core, directory: Directory, checked_at: float) -> None:
    """Take in that the store has entries of a directory, and no object for the directory itself."""
    own = directory.attributes
    defaults = core.settings.defaults.of(directory.listed_kind, own.mtime_ns)
    directory.attributes = defaults._replace(ctime_ns=own.ctime_ns, atime_ns=own.atime_ns)
    directory.marker, directory.attrs_valid = False, True
    directory.asked_at, directory.told = checked_at, None


def replaced(core: Core, node: Node, etag: ETag, size: int, mtime_ns: int) -> None:
    """Take in that another client wrote this version; its attributes are not known yet."""
    if etag != node.etag:
        node.pages_valid = False
    if node.nlookup:
        core.notifier.inval_inode(node.ino, 0 if etag != node.etag else -1)
    node.etag, node.size, node.mtime_ns, node.attrs_valid = etag, size, mtime_ns, False
    node.made_at = NEVER
    core.opens.moved_on(node.ino, etag, size)


# -- this mount did it


def written(core: Core, node: Node, result: WriteResult, *, attrs_valid: bool = True) -> None:
    """Take in that this mount wrote or copied the object. attrs_valid False: ask the store for its attributes."""
    if not isinstance(node, Directory):
        node.etag, node.mtime_ns = result.etag, result.mtime_ns or core.clock.time_ns()
        core.opens.moved_on(node.ino, node.etag, node.size)
    node.attrs_valid, node.racy = attrs_valid, True
    node.asked_at = node.made_at = core.clock.monotonic() if attrs_valid else NEVER
    node.told = None


def edited(node: Node, attributes: Attributes, size: int | None = None) -> None:
    """Set attributes that this mount changed; the caller must send them. size: the new size after a write."""
    node.attributes = attributes
    if size is not None:
        node.size = size


def held(node: Node, size: int, etag: ETag, attributes: Attributes | None = None) -> None:
    """Give the node a version without asking the store: it is not sent yet, is at another key, or was open in an
    earlier server. attributes: those of that version, if they are known.
    """
    node.size, node.etag = size, etag
    if attributes is not None:
        node.attributes, node.attrs_valid = attributes, True


def doubted(node: Node, *, attributes: bool = False) -> None:
    """Make the next use of the node ask the store. attributes: its attributes are of another version."""
    node.asked_at = node.made_at = NEVER
    node.told = None
    node.attrs_valid = node.attrs_valid and not attributes


# -- shared by the above


def _take_listed(core: Core, node: Node, shown: Listed) -> None:
    """Take the attributes from a listing that shows the node's version and its metadata (S-129), else from memory."""
    if shown.said is None or not core.settings.full_attributes:
        recalled(core, node)
        return
    metadata, content_type = unpacked(shown.said)
    # A HEAD gives whole seconds; a listing that replaces it has to give the same time.
    node.mtime_ns = shown.mtime_ns // _SECOND_NS * _SECOND_NS
    _describe(core, node, metadata, content_type)
    # A later listing without metadata must not confirm these attributes.
    node.racy = True


def _describe(core: Core, node: Node, metadata: Mapping[str, str], content_type: str) -> None:
    """Set the attributes from the metadata of the node's version."""
    defaults = core.settings.defaults
    of_kind = defaults.of(node.listed_kind, node.mtime_ns)
    attributes = defaults.seen(from_metadata(metadata, node.listed_kind, of_kind, content_type))
    if isinstance(node, Directory) and node.attrs_valid:
        # A directory's times change with its entries, and no marker records that: keep the newest time seen.
        own = node.attributes
        mtime_ns, ctime_ns = max(own.mtime_ns, attributes.mtime_ns), max(own.ctime_ns, attributes.ctime_ns)
        attributes = attributes._replace(mtime_ns=mtime_ns, ctime_ns=ctime_ns)
    node.attributes, node.attrs_valid = attributes, True
    if attributes.target is not None:
        node.size = len(attributes.target)


def _follow_listing(core: Core, node: Node) -> None:
    """Let whatever confirms the parent's listing confirm this node as well, if the listing shows the node's version.
    With full attributes this does not hold for a directory, because the listing shows nothing of its marker.
    """
    listing = node.parent.listing if node.parent is not None else None
    shown = listing.entries.get(node.name) if listing is not None else None
    if listing is None or shown is None or shown.tail != node.tail:
        return
    # A racy version may have changed within its second: the listing counts only if it shows the attributes, too.
    whole = node.is_version(shown) and (shown.said is not None or not node.racy)
    if not core.settings.full_attributes if isinstance(node, Directory) else whole:
        node.told = listing.stamp_of(shown.tail)
