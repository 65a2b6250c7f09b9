"""The pages name modules, and verbs of the command, that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from datastore.cli.app import VERBS

ROOT = Path(__file__).parents[2]
PACKAGES = ("", "datastore/", "datastore/fuse/", "datastore/csi/")
NAMED = re.compile(r"`([a-z0-9_]+(?:/[a-z0-9_]+)+(?:\.py)?/?|[a-z0-9_]+\.py|datastore(?:\.[a-z0-9_]+)+)`")
"""`kernel/session`, `fuse/errnos.py`, `reply.py`, `datastore.listening`."""
VERB = re.compile(r"`datastore ([a-z][a-z-]*)")


def exists(name: str, beside: str) -> bool:
    """Whether a module or folder is there: from the root, inside a package, or beside the one that was named before."""
    path = name.replace(".", "/") if name.startswith("datastore.") else name.removesuffix(".py").rstrip("/")
    places = [ROOT / package / path for package in PACKAGES] + [ROOT / beside / path]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "BENCH.md", "CONCURRENCY.md", "decisions/0022-what-stays.md"])
def test_every_module_that_a_page_names_exists(page: str) -> None:
    missing = []
    for line in (ROOT / "docs" / page).read_text().splitlines():
        beside = ""
        for name in NAMED.findall(line):
            if not exists(name, beside):
                missing.append(name)
            beside = str(Path(name).parent) if "/" in name else beside
    assert not missing, f"docs/{page} names what is not there: {', '.join(missing)}"


def test_every_verb_that_a_page_names_exists() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {(verb, page.name) for page in pages for verb in VERB.findall(page.read_text())}
    assert {verb for verb, _ in named} >= {"mount", "status"}
    assert [(verb, page) for verb, page in sorted(named) if verb not in VERBS] == []
