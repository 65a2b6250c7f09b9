"""`datastore status [DIR|NAME]`: what a mount is doing, and which changes are not uploaded."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from datastore.cli.arguments import Output
from datastore.cli.console import Format, note, one_line, print_columns, print_json
from datastore.cli.inspection import NONE_MOUNTED, complete_mounted, find, inspect
from datastore.cli.rates import short_time
from datastore.histogram import quantile_s
from datastore.mounting.records import all_records
from datastore.mounting.silence import storage_words
from datastore.units import format_count, format_duration, format_size


def status_command(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR|NAME",
            help="Directory or name of a mounted Datastore. Default: all mounts.",
            autocompletion=complete_mounted,
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show everything known about a mount.")] = False,
    output: Output = Format.TABLE,
) -> None:
    """Show each mount: its state, its storage, its cache, and the files that are not uploaded, with their errors."""
    records = all_records() if target is None else [find(target)]
    seen = [inspect(record) for record in records]
    if output is Format.JSON:
        print_json(seen if target is None else seen[0])
        return
    if not seen:
        note(NONE_MOUNTED)
    for number, each in enumerate(seen):
        sys.stdout.write("\n" * (number > 0) + (_text(each) if verbose else _short(each)))
        if verbose:
            _print_requests(each)
            _print_store(each)
    for each in seen:
        _print_dirty(each, None if verbose else _SHOWN_FILES)


_SHOWN_FILES = 10
"""How many of a mount's files that are not uploaded are listed without --verbose."""


def _short(seen: Mapping[str, Any]) -> str:
    read_only = ", read-only" if seen["readOnly"] else ""
    lines = [seen["name"], f"  {seen['state']} at {seen['mountpoint']}{read_only}, from {seen['location']}"]
    lines.append(f"  via {seen['via']['transport']}: {seen['via']['why']}")
    if seen.get("trouble"):
        lines.append(f"  trouble: {seen['trouble']}")
    if words := storage_words(seen):
        lines.append(f"  {words}")
    cache = seen.get("cache", {})
    if "limit" in cache:
        hits, asked = cache.get("hits", 0), cache.get("hits", 0) + cache.get("misses", 0)
        answered = f", {hits / asked:.0%} of reads came from it" if asked else ""
        lines.append(f"  cache: {format_size(cache['bytes'])} of {format_size(cache['limit'])}{answered}")
    if dirty := seen["dirty"]:
        size = sum(each["bytes"] for each in dirty if isinstance(each.get("bytes"), int))
        failed = sum(1 for each in dirty if each.get("error"))
        lines.append(f"  not uploaded: {format_count(len(dirty), 'file')}, {format_size(size)}; {failed:,} failed")
    if seen.get("unfinished"):
        lines.append(f"  renames begun and not ended: {len(seen['unfinished'])}")
    return "\n".join(map(_line, lines)) + "\n"


def _line(text: str) -> str:
    return text[: len(text) - len(text.lstrip())] + one_line(text)


_NO_FACTS = ("dirty", "name", "requests", "latency", "store")
"""The fields that are shown in a table of their own or, like the name, as a heading."""


def _text(seen: Mapping[str, Any]) -> str:
    facts = {key: value for key, value in seen.items() if key not in _NO_FACTS}
    lines = [f"{seen['name']}"]
    lines += [f"  {key}: {one_line(text)}" for key, value in facts.items() if (text := _value(key, value))]
    return "\n".join(lines) + "\n"


def _value(key: str, value: object) -> str:
    """Return the text of a field; '' if there is nothing in it. Empty fields of a field are left out."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{inner} {text}" for inner, each in value.items() if (text := _value(inner, each)))
    if isinstance(value, list):
        return ", ".join(_value(key, each) for each in value)
    if isinstance(value, int) and key.lower().endswith(("bytes", "limit")):
        return format_size(value)
    return str(value)


def _print_requests(seen: Mapping[str, Any]) -> None:
    latency = seen.get("latency")
    if not latency:
        return
    rows = [
        [name, str(row["count"]), short_time(row["p50Seconds"]), short_time(row["p99Seconds"])]
        for name, row in latency.items()
    ]
    print_columns(("REQUESTS", "COUNT", "P50", "P99"), rows, indent="  ")


def _print_store(seen: Mapping[str, Any]) -> None:
    store = seen.get("store")
    if not store:
        return
    rows = [
        [
            method,
            str(row["calls"]),
            short_time(quantile_s(row["buckets"], 0.5)),
            short_time(quantile_s(row["buckets"], 0.99)),
            format_size(row["sent_bytes"]),
            format_size(row["received_bytes"]),
            _counts(row["retries"]),
            _counts(row["errors"]),
        ]
        for method, row in store.items()
    ]
    print_columns(("STORE", "CALLS", "P50", "P99", "SENT", "RECEIVED", "RETRIED", "FAILED"), rows, indent="  ")


def _counts(by_class: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in by_class.items())


def _print_dirty(seen: Mapping[str, Any], most: int | None) -> None:
    """Print a mount's files that are not uploaded: the first `most`, or all if that is None."""
    if not seen["dirty"]:
        return
    sys.stdout.write(f"\nnot uploaded yet, {seen['name']} at {seen['mountpoint']}:\n")
    rows = []
    for each in seen["dirty"][:most]:
        size = each.get("bytes")
        rows.append(
            [
                str(each.get("path", "?")),
                format_size(size) if isinstance(size, int) else "?",
                _age(each.get("since")),
                str(each.get("error") or "waiting"),
            ]
        )
    print_columns(("FILE", "SIZE", "AGE", "STATE"), rows)
    if len(seen["dirty"]) > len(rows):
        sys.stdout.write(f"and {len(seen['dirty']) - len(rows):,} more (-v shows all)\n")


def _age(since: object) -> str:
    if not isinstance(since, int | float) or since <= 0:
        return "?"
    return format_duration(max(0, int(time.time() - since)))
