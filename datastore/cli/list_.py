"""`datastore list`."""

from __future__ import annotations

from datastore.cli.arguments import Output
from datastore.cli.console import Format, print_columns, print_json
from datastore.cli.inspection import NONE_MOUNTED, inspect
from datastore.mounting.records import all_records
from datastore.mounting.silence import state_words

_COLUMNS = ("NAME", "MOUNTPOINT", "LOCATION", "MODE", "STATE", "UNSENT", "FAILED")


def list_command(output: Output = Format.TABLE) -> None:
    """List this user's mounts, including crashed ones and those with changes that are not uploaded."""
    seen = [inspect(record) for record in all_records()]
    if output is Format.JSON:
        shown = ("name", "mountpoint", "location", "readOnly", "state", "via", "storage")
        print_json([{**{key: each.get(key, {}) for key in shown}, **_counts(each["dirty"])} for each in seen])
        return
    rows = []
    for each in seen:
        counts = _counts(each["dirty"])
        mode = "ro" if each["readOnly"] else "rw"
        numbers = [str(counts["unsent"]), str(counts["failed"])]
        rows.append([each["name"], each["mountpoint"], each["location"], mode, state_words(each), *numbers])
    print_columns(_COLUMNS, rows, if_empty=NONE_MOUNTED)


def _counts(dirty: list[dict[str, object]]) -> dict[str, int]:
    return {"unsent": len(dirty), "failed": sum(1 for each in dirty if each.get("error"))}
