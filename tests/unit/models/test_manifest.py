"""datastore.models.manifest: one text for one content, every byte of it guarded (S-371)."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.models.errors import InvalidReference, VersionDamaged
from datastore.models.manifest import (
    HEAD_BYTES,
    Entry,
    Lineage,
    Removed,
    VersionManifest,
    digest_of,
    of_entries,
    parse,
    parse_head,
)
from datastore.models.names import Reference, check_alias, check_model, parse_reference
from tests.promises import promise

SHA = hashlib.sha256(b"x").hexdigest()
ENTRIES = [
    Entry("assets", "directory", 0o755),
    Entry("latest", "symlink", target="weights/été"),
    Entry("weights", "directory", 0o700),
    Entry("weights/été", "file", 0o4755, 1, SHA),
]
LINEAGE = Lineage(datastore="runs", path="7", by="ann", training_job_uid="u-1", command=("python", "train.py"))


def made(entries: list[Entry] | None = None, **more: object) -> VersionManifest:
    given = {"saved": "2026-01-31T12:00:00Z", "labels": {"b": "2", "a": "1"}, "lineage": LINEAGE, **more}
    return of_entries("digits", 7, ENTRIES if entries is None else entries, **given)  # type: ignore[arg-type]


@promise("S-371")
def test_the_text_of_a_manifest_is_fixed() -> None:
    """Whoever reads a store without us relies on it, so it does not change."""
    assert made().text() == (
        '{"format":"datastore.dev/model-version/v1","model":"digits","version":7,'
        '"digest":"sha256:390a046122d9ab28663b4d94bd1f1e716f1dfb3763c170fac43f17e00d9c1892","files":1,"bytes":1,'
        '"saved":"2026-01-31T12:00:00Z","labels":{"a":"1","b":"2"},"lineage":{"datastore":"runs","path":"7","by":"ann",'
        '"trainingJobUID":"u-1","command":["python","train.py"]},\n'
        '"entries":[\n'
        '{"path":"assets","type":"directory","mode":"0755"},\n'
        '{"path":"latest","type":"symlink","target":"weights/\\u00e9t\\u00e9"},\n'
        '{"path":"weights","type":"directory","mode":"0700"},\n'
        f'{{"path":"weights/\\u00e9t\\u00e9","type":"file","mode":"4755","size":1,"sha256":"{SHA}"}}\n'
        "],\n"
        '"check":"sha256:da92c363f503a42d7746f68d14ff193cd653018fa050dee754b8b3742d871071"}\n'
    )


@promise("S-371")
def test_others_can_compute_both_digests() -> None:
    """As docs/MODELS.md says it, with nothing but a JSON parser."""
    text = made().text()
    lines = text.split("\n")
    entries = "".join(line.removesuffix(",") + "\n" for line in lines[2:-3])
    document = json.loads(text)

    assert document["digest"] == f"sha256:{hashlib.sha256(entries.encode()).hexdigest()}"
    before = text[: text.rindex('"check"')]
    assert document["check"] == f"sha256:{hashlib.sha256(before.encode()).hexdigest()}"


@promise("S-370")
def test_the_commands_of_the_page_check_a_manifest(tmp_path: Path) -> None:
    """Docs/MODELS.md, without this program."""
    (tmp_path / "7.json").write_text(made().text())
    page = (Path(__file__).resolve().parents[3] / "docs" / "MODELS.md").read_text()
    commands = [line.partition("#")[0] for line in page.splitlines() if "7.json" in line and "| sha256sum  " in line]
    found = [
        subprocess.run(["sh", "-c", each], cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split()[0]
        for each in commands
    ]
    document = json.loads(made().text())
    assert [f"sha256:{each}" for each in found] == [document["check"], document["digest"]]


def test_a_manifest_and_its_head_alone_are_parsed() -> None:
    manifest = made()
    raw = manifest.text().encode()

    assert parse(raw, "f") == manifest
    assert parse_head(raw[:HEAD_BYTES], "f") == VersionManifest(
        **{**{name: getattr(manifest, name) for name in VersionManifest.__slots__}, "entries": ()}
    )


def test_a_number_that_is_no_version_says_why() -> None:
    removed = Removed(at="2026-01-31T12:00:00Z", by="ann", why="deleted")
    gone = VersionManifest(model="m", version=2, digest="", files=0, size_bytes=0, saved="", removed=removed)

    assert parse(gone.text().encode(), "f").removed == removed
    assert parse_head(gone.text().encode(), "f").removed == removed


@promise("S-383")
def test_every_changed_byte_is_noticed() -> None:
    """All bytes of the document, one after the other."""
    raw = made().text().encode()
    assert parse(raw, "f")

    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        if damaged[at : at + 1] in b" \t\r\n" and raw[at : at + 1] in b" \t\r\n":
            continue
        with pytest.raises(VersionDamaged, match=r"^m/7\.json: "):
            parse(bytes(damaged), "m/7.json")
    for length in range(len(raw) - 1):
        with pytest.raises(VersionDamaged):
            parse(raw[:length], "m/7.json")


@promise("S-371")
def test_the_digest_is_of_the_files_and_nothing_else() -> None:
    other = of_entries("other", 9, reversed(ENTRIES), saved="2030-01-01T00:00:00Z")
    assert other.digest == made().digest == digest_of(ENTRIES)

    for changed in (
        ENTRIES[:-1],
        [*ENTRIES[:-1], ENTRIES[-1]._replace(mode=0o755)],
        [*ENTRIES[:-1], ENTRIES[-1]._replace(sha256="0" * 64)],
        [ENTRIES[0]._replace(mode=0o700), *ENTRIES[1:]],
        [ENTRIES[0], ENTRIES[1]._replace(target="elsewhere"), *ENTRIES[2:]],
        ENTRIES[1:],
    ):
        assert made(changed).digest != made().digest


@promise("S-385")
@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("../x", "no plain relative path"),
        ("/etc/passwd", "no plain relative path"),
        ("a//b", "no plain relative path"),
        ("a/./b", "no plain relative path"),
        ("", "no plain relative path"),
        ("a\0b", "no plain relative path"),
        ("missing/x", "no directory of it"),
        ("latest/x", "no directory of it"),
        ("x" * 256, "too long"),
        ("bad\udcffbyte", "not UTF-8"),
    ],
)
def test_a_path_that_leads_elsewhere_is_never_believed(path: str, what: str) -> None:
    """Neither from us nor from who can write to the store."""
    entry = Entry(path, "file", 0o644, 1, SHA)
    with pytest.raises(ValueError, match=what):
        made([*ENTRIES, entry])

    forged = VersionManifest(
        model="m", version=1, digest=digest_of([]), files=0, size_bytes=0, saved="", entries=[*ENTRIES, entry]
    )
    if path != "bad\udcffbyte":
        with pytest.raises(VersionDamaged):
            parse(forged.text().encode(), "f")


def test_a_path_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        made([*ENTRIES, ENTRIES[0]])


def test_a_head_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="64 KiB"):
        made(lineage=Lineage(command=("x" * HEAD_BYTES,)))


@given(st.text(), st.binary(max_size=300))
def test_every_other_text_is_a_damaged_manifest(text: str, raw: bytes) -> None:
    for each in (text.encode("utf-8", "surrogatepass"), raw):
        with pytest.raises(VersionDamaged):
            parse(each, "f")
        with pytest.raises(VersionDamaged):
            parse_head(each, "f")


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("digits", Reference("digits")),
        ("digits:latest", Reference("digits")),
        ("digits:7", Reference("digits", version=7)),
        ("digits:prod-eu", Reference("digits", alias="prod-eu")),
        ("a1-b", Reference("a1-b")),
    ],
)
def test_a_reference_names_a_version(text: str, reference: Reference) -> None:
    assert parse_reference(text) == reference


@pytest.mark.parametrize(
    "text", ["", "Digits", "-a", "a_b", "a/b", "..", "x" * 64, "a:", "a:0", "a:07", "a:Prod", "a:7x", "a:../b", "a:1:2"]
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(InvalidReference):
        parse_reference(text)


def test_latest_can_not_be_moved() -> None:
    with pytest.raises(InvalidReference, match="newest"):
        check_alias("latest")
    with pytest.raises(InvalidReference):
        check_model("a:b")
