"""What a person sees: data on standard output, everything else on standard error. NO_COLOR is honoured by rich."""

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
    """Standard error as it is now; nothing in a text is taken for markup, and no line is wrapped."""
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False, emoji=False)


def note(text: str) -> None:
    """A line for the person, on standard error."""
    diagnostics().print(one_line(text))


def fail(text: str) -> None:
    """The one line of an error."""
    console = diagnostics()
    console.print("error: ", style="bold red", end="")
    console.print(one_line(text))


def one_line(text: str) -> str:
    """The text without line breaks and control characters: server messages and file names may hold some."""
    joined = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in joined)


def print_json(data: Any) -> None:
    """Data for programs, on standard output."""
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=True) + "\n")


def print_columns(header: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> None:
    """Aligned columns, never cut, on standard output."""
    table = [list(header), *([one_line(cell) or "-" for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    for row in table:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(f"{indent}{line}".rstrip() + "\n")
