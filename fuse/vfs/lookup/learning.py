"""Attributes of nodes from what the store, or memory, says of their objects. The state lock is held in all methods."""

from __future__ import annotations

import stat

from ...store.base import ETag, ObjectInfo
from ...store.packed import unpacked
from ..tree.attrs import Attributes, from_metadata, stands_for_directory
from ..tree.core import Core
from ..tree.listing import Listed, Listing
from ..tree.nodes import Directory, Node

_SECOND_NS = 1_000_000_000

Was = tuple[tuple[int, ...], ETag, int]


def was_of(node: Node) -> Was:
    """Where a node is now, and as what: an answer is of that if it is the same then, else it may be older."""
    return node.place, node.etag, node.changes


class Learning:
    """How nodes of one mount come to their attributes."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def listed(self, node: Node, listed: Listed) -> None:
        """A listing shows the version that the node has: the attributes with it (S-129), or as memory knows them."""
        if listed.said is None or not self._core.settings.full_attributes:
            self.recall(node)
            return
        metadata, content_type = unpacked(listed.said)
        # A HEAD tells times in seconds, and so does a listing that stands for one.
        node.mtime_ns = listed.mtime_ns // _SECOND_NS * _SECOND_NS
        kind = node.listed_kind
        if stands_for_directory(node.tail, node.size, content_type):
            return  # a HEAD tells
        defaults = self._core.settings.defaults.of(kind, node.mtime_ns)
        seen = self._core.settings.defaults.seen(from_metadata(metadata, kind, defaults, content_type))
        self._set(node, seen)
        # A listing that shows no metadata any more is not to be believed beside it.
        node.racy = True

    def recall(self, node: Node) -> None:
        """Attributes of the node's version as far as memory knows them. What was done to it here meanwhile stays."""
        core = self._core
        if node.dirty:
            return
        kind = node.listed_kind
        defaults = core.settings.defaults.of(kind, node.mtime_ns)
        if not core.settings.full_attributes:
            node.attributes = defaults
            return
        known = core.known.known(node.key, node.etag, node.mtime_ns)
        if known is not None and not stands_for_directory(node.tail, node.size, known[1]):
            seen = core.settings.defaults.seen(from_metadata(known[0], kind, defaults, known[1]))
            self._set(node, seen)
            node.racy = False

    def take_in(self, node: Node, info: ObjectInfo) -> None:
        """The attributes of the version that the store has."""
        own, kind = node.attributes, node.listed_kind
        defaults = self._core.settings.defaults.of(kind, info.mtime_ns)
        attributes = from_metadata(info.metadata, kind, defaults, info.content_type)
        attributes = self._core.settings.defaults.seen(attributes)
        if isinstance(node, Directory):
            if node.attrs_valid:
                # Times move when entries come and go, which no marker records: the newest that we saw.
                attributes = attributes._replace(
                    mtime_ns=max(own.mtime_ns, attributes.mtime_ns), ctime_ns=max(own.ctime_ns, attributes.ctime_ns)
                )
            node.marker = True
            info_size = 0
        else:
            info_size = info.size
        node.size, node.etag, node.mtime_ns = info_size, info.etag, info.mtime_ns
        self._core.opens.moved_on(node.ino, node.etag, node.size)
        self._set(node, attributes)

    def directory(self, directory: Directory, listing: Listing) -> None:
        """Its own listing tells of a directory what a HEAD would: that it has no marker, or one that is known."""
        own = listing.own
        if own is None:
            if listing.entries and not listing.marker and directory.parent is not None:
                self.without_marker(directory, listing.listed_at)
                directory.told = listing.stamp
            return
        known = self._core.known.known(own.key, own.etag, own.mtime_ns) if own.said is None else unpacked(own.said)
        if known is not None:
            mtime_ns = own.mtime_ns // _SECOND_NS * _SECOND_NS
            self.take_in(directory, ObjectInfo(own.key, 0, own.etag, mtime_ns, 0, known[0], known[1]))
            directory.racy, directory.checked_at = False, listing.listed_at
            directory.told = listing.stamp

    def without_marker(self, node: Directory, checked_at: float) -> None:
        """A directory of which only entries are there."""
        own = node.attributes
        defaults = self._core.settings.defaults.of(stat.S_IFDIR, own.mtime_ns)
        node.attributes = defaults._replace(ctime_ns=own.ctime_ns, atime_ns=own.atime_ns)
        node.marker = False
        node.attrs_valid = True
        node.checked_at = checked_at

    @staticmethod
    def _set(node: Node, attributes: Attributes) -> None:
        node.attributes = attributes
        node.attrs_valid = True
        if attributes.target is not None:
            node.size = len(attributes.target)
