"""Printing: data goes to standard output, everything else to standard error. The library rich honours NO_COLOR."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from rich.console import Console


class Format(StrEnum):
    """How data is printed."""

    TABLE = "table"
    JSON = "json"


def diagnostics() -> Console:
    """Return a console for the present standard error that takes no text for markup and wraps no line."""
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)


def note(text: str) -> None:
    """Print one line for the user on standard error."""
    diagnostics().print(one_line(text))


def fail(text: str) -> None:
    """Print the one line of an error on standard error."""
    console = diagnostics()
    console.print("error: ", style="bold red", end="")
    console.print(one_line(text))


def one_line(text: str) -> str:
    """Return the text on one line, with '?' for control characters: server messages and file names may hold some."""
    joined = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in joined)


def print_json(data: Any) -> None:
    """Print data for programs on standard output."""
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=True) + "\n")


def print_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "", *, if_empty: str = ""
) -> None:
    """Print aligned columns, which are never cut, on standard output; if_empty: a note for the user of a list."""
    table = [list(header), *([one_line(cell) or "-" for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(f"{indent}{line}".rstrip() + "\n")
    if if_empty and not rows:
        note(if_empty)
