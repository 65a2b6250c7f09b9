"""Every promise of docs/SEMANTICS.md is named by a test, and no test names a promise that is not made."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMISE = re.compile(r"\bS-(\d{2,3})\b")


def _ids(text: str) -> set[str]:
    return {f"S-{number}" for number in PROMISE.findall(text)}


def test_the_ids_of_the_document_and_of_the_tests_are_the_same() -> None:
    promised = _ids((ROOT / "docs" / "SEMANTICS.md").read_text())
    named = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path != Path(__file__).resolve():
            named |= _ids(path.read_text())
    assert sorted(promised - named) == [], "promises that no test names"
    assert sorted(named - promised) == [], "ids in tests that the document does not promise"
