"""What is known of a node has one owner, `vfs/tree/facts.py`."""

from __future__ import annotations

import ast
from pathlib import Path

VFS = Path(__file__).parents[3] / "fuse" / "vfs"
FACTS = {
    "asked_at", "attributes", "attrs_valid", "checked_at", "etag", "made_at", "mtime_ns", "racy", "size", "told",
}  # fmt: skip
MAKERS = {"tree/facts.py", "tree/nodes.py"}
"""The second one makes nodes, and gives them what they begin with."""


def test_only_the_owner_assigns_what_is_known_of_a_node() -> None:
    found = [
        f"{name}:{target.lineno} assigns .{target.attr}"
        for path in sorted(VFS.rglob("*.py"))
        if (name := str(path.relative_to(VFS))) not in MAKERS
        for target in ast.walk(ast.parse(path.read_text()))
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store) and target.attr in FACTS
    ]
    assert not found, "call a function of tree/facts.py instead"
