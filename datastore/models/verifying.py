"""Read a version again, and check that every byte, name, link, mode and empty directory is as it was saved."""

from __future__ import annotations

from collections.abc import Sequence

from datastore.models.errors import VersionDamaged
from datastore.models.manifest import Entry, VersionManifest
from datastore.models.progress import Progress
from datastore.models.registry import Models
from datastore.models.storage import Node, ReadableTree, differences
from datastore.models.transfer import Transfer


def verify(models: Models, model: str, number: int, progress: Progress) -> tuple[VersionManifest, list[str]]:
    """Return the version's manifest, and a text for each path that is not as it was saved, with both digests if known.

    Errors: ModelNotFound; VersionDamaged when the manifest itself is damaged; StoreError.
    """
    progress.begin("looking")
    manifest = models.manifest(model, number)
    return manifest, damages(models.tree(model, number), manifest, progress)


def damages(tree: ReadableTree, manifest: VersionManifest, progress: Progress) -> list[str]:
    """Return a text for each path of a tree that is not as the manifest says. Errors: StoreError."""
    nodes = {node.path: node for node in tree.scan()}
    found = list(differences(tree.location, manifest.entries, list(nodes.values())))
    entries = {entry.path: entry for entry in manifest.entries if entry.kind == "file"}
    readable = [nodes[path] for path, entry in entries.items() if path in nodes and nodes[path].size == entry.size]
    progress.begin("checking", len(readable), sum(node.size for node in readable))
    with Transfer(progress) as transfer:

        def check(node: Node) -> str | None:
            try:
                transfer.check(tree, node, entries[node.path])
            except VersionDamaged as error:
                return str(error)
            return None

        found += [damage for damage in transfer.each(readable, check) if damage]
    return sorted(found)


def first_of(found: Sequence[str]) -> str:
    """Return the first of these texts, and how many more there are."""
    return found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")


def compared(first: VersionManifest, second: VersionManifest) -> list[tuple[str, Entry | None, Entry | None]]:
    """Return each path that differs, with its entries in both versions, or None where a version lacks it. Pure."""
    before = {entry.path: entry for entry in first.entries}
    after = {entry.path: entry for entry in second.entries}
    paths = sorted(before.keys() | after.keys())
    return [(path, before.get(path), after.get(path)) for path in paths if before.get(path) != after.get(path)]
