"""Tables that are shown anew after each interval: on a terminal in place, elsewhere one after the other."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from datastore.cli.console import Format, one_line, print_columns, print_json
from datastore.mounting.signals import SignalWatch

Row = dict[str, Any]


class LiveTable:
    """left: the columns that are aligned to the left. cells: returns the cells of a row. once: show one interval."""

    def __init__(
        self,
        columns: Sequence[str],
        left: Sequence[str],
        cells: Callable[[Row], list[str]],
        output: Format,
        once: bool,
        stack: ExitStack,
    ) -> None:
        self._columns = columns
        self._left = left
        self._cells = cells
        self._output = output
        self._once = once
        self._stack = stack
        self._live: Live | None = None

    @property
    def in_place(self) -> bool:
        """Whether a terminal shows the newest rows in place of those before."""
        return self._output is Format.TABLE and not self._once and sys.stdout.isatty()

    def show(self, rows: Sequence[Row]) -> None:
        """Show these rows, or print them for programs: one line of JSON for each interval."""
        if self.in_place:
            if self._live is None:
                self._live = self._stack.enter_context(Live(console=Console(), auto_refresh=False))
            self._live.update(self._table(rows), refresh=True)
            return
        if self._output is Format.TABLE:
            print_columns(self._columns, [self._cells(row) for row in rows])
        elif self._once:
            print_json(rows)
        else:
            sys.stdout.write(json.dumps(rows) + "\n")
        sys.stdout.flush()

    def _table(self, rows: Sequence[Row]) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in self._columns:
            table.add_column(name, justify="left" if name in self._left else "right", no_wrap=name != "MOUNTPOINT")
        for row in rows:
            # Text, so that rich does not take brackets in a name for markup.
            table.add_row(*(Text(one_line(cell)) for cell in self._cells(row)))
        return table


def waited_out(watch: SignalWatch, seconds: float) -> bool:
    """Wait for the interval; return True at once when a signal comes, which ends the command."""
    end = time.monotonic() + seconds
    while (left_s := end - time.monotonic()) > 0:
        watch.wait([], left_s)
        if watch.take() is not None:
            return True
    return False
