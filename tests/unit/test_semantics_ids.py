"""Every promise of docs/SEMANTICS.md is declared by a test (@promise), and no test names a promise that is not made."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMISE = re.compile(r"\bS-(\d{2,3})\b")


def _ids(text: str) -> set[str]:
    return {f"S-{number}" for number in PROMISE.findall(text)}


def _declared(path: Path) -> set[str]:
    """The arguments of every @promise in a file."""
    calls = [each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Call)]
    ours = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id == "promise"]
    return {ast.literal_eval(word) for each in ours for word in each.args}


def test_the_ids_of_the_document_and_of_the_tests_are_the_same() -> None:
    promised = _ids((ROOT / "docs" / "SEMANTICS.md").read_text())
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__).resolve()]
    declared = set().union(*map(_declared, files))
    named = set().union(*(_ids(path.read_text()) for path in files))
    assert sorted(promised - declared) == [], "promises that no test declares to show: @promise"
    assert sorted(declared - promised) == [], "ids in tests that the document does not promise"
    assert sorted(named - promised) == [], "ids in comments of tests that the document does not promise"


def test_each_line_of_the_threat_model_names_its_promise() -> None:
    text = (ROOT / "docs" / "SECURITY.md").read_text()
    assert sorted(_ids(text) - _ids((ROOT / "docs" / "SEMANTICS.md").read_text())) == []
    tables = [part.splitlines() for part in text.split("\n\n") if part.splitlines()[0].endswith("| promise |")]
    assert len(tables) >= 4
    bare = [row for rows in tables for row in rows[2:] if not _ids(row.rsplit("|", 2)[1])]
    assert bare == [], "lines whose test nobody finds"
