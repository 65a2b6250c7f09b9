"""`datastore doctor [FILE [NAME]]`: what works here, what does not, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from datastore.api.datastore import DEFAULT_CACHE_BYTES, Datastore
from datastore.api.manifest import Manifest, load
from datastore.api.resolve import s3_location
from datastore.cli.arguments import Output
from datastore.cli.clusterchecks import cluster_checks
from datastore.cli.console import Format, one_line, print_json
from datastore.cli.findings import Finding, Level, bad, ok
from datastore.cli.hostchecks import host_checks
from datastore.cli.kubectl import Kubectl
from datastore.cli.mount import say_credentials
from datastore.cli.places import cache_root
from datastore.cli.release import Namespace

_STYLE = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def doctor_command(
    file: Annotated[
        str | None, typer.Argument(metavar="[FILE]", help="Check the storage of its Datastores too.")
    ] = None,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this Datastore of the file.")] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the Datastore of this name in the cluster of kubectl's context.")
    ] = False,
    namespace: Namespace = "",
    output: Output = Format.TABLE,
) -> None:
    """Check this machine, and the storage of a manifest. Exit code 0: nothing failed; otherwise that of a mount."""
    seen: list[Finding] = []
    for finding in _asked(file, name, namespace) if cluster else _here(file, name):
        seen.append(finding)
        if output is Format.TABLE:
            _print(finding)
    if output is Format.JSON:
        print_json([{**asdict(each), "code": int(each.code)} for each in seen])
    failed = [each for each in seen if each.level is Level.FAIL]
    raise typer.Exit(failed[-1].code if failed else 0)


def _asked(name: str | None, more: str | None, namespace: str) -> Iterator[Finding]:
    if name is None or more is not None:
        raise typer.BadParameter("name one Datastore: datastore doctor NAME --cluster", param_hint="--cluster")
    return cluster_checks(Kubectl(namespace), name)


def _here(file: str | None, name: str | None) -> Iterator[Finding]:
    manifest = load(file) if file else None
    return _findings(manifest, _chosen(manifest, name))


def _chosen(manifest: Manifest | None, name: str | None) -> list[Datastore]:
    if manifest is None:
        return []
    return [manifest.pick(name)] if name else list(manifest.datastores)


def _findings(manifest: Manifest | None, chosen: list[Datastore]) -> Iterator[Finding]:
    cache = chosen[0].spec.cache if chosen else None
    cache_dir = Path(cache.dir) if cache and cache.dir else cache_root()
    yield from host_checks(cache_dir, cache.size if cache else DEFAULT_CACHE_BYTES)
    for datastore in chosen:
        if manifest:
            yield from _storage(manifest, datastore)


def _storage(manifest: Manifest, datastore: Datastore) -> Iterator[Finding]:
    if datastore.spec.local:
        path = Path(datastore.spec.local.path)
        found = path.is_dir()
        yield (
            ok(datastore.name, f"{path} is a directory")
            if found
            else bad(datastore.name, f"{path} is not a directory", "correct spec.local.path")
        )
        return
    say_credentials(manifest, datastore)
    location = s3_location(manifest, datastore)
    # Not at the top: the S3 libraries take a second to load, and only this verb needs them.
    from datastore.cli.storechecks import store_checks

    yield from store_checks(datastore.name, location, read_only=datastore.spec.read_only)


def _print(finding: Finding) -> None:
    line = Text()
    line.append(f"{finding.level.value:<4}", style=_STYLE[finding.level])
    line.append(f"  {finding.check}: {one_line(finding.text)}")
    if finding.todo:
        line.append(f"\n      to do: {one_line(finding.todo)}")
    Console(soft_wrap=True, highlight=False).print(line)
