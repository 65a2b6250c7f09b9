"""`datastore doctor [FILE [NAME]]`: what works here, what does not, and what to do about it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from datastore.api.datastore import Datastore
from datastore.api.manifest import Manifest, load
from datastore.api.mountspec import DEFAULT_CACHE_BYTES
from datastore.api.resolve import source_in
from datastore.api.source import GlusterFSLocation, NFSLocation, S3Location, SFTPLocation
from datastore.backends import glusterfs
from datastore.cli.arguments import Output
from datastore.cli.clusterchecks import cluster_checks
from datastore.cli.console import Format, one_line, print_json
from datastore.cli.exitcodes import ExitCode, exit_code_for
from datastore.cli.findings import Finding, Level, bad, ok, warn
from datastore.cli.hostchecks import host_checks
from datastore.cli.mount import say_credentials
from datastore.cli.mountarguments import complete_datastores
from datastore.cli.removefinalizer import Namespace
from datastore.errors import DatastoreError
from datastore.kubeclient import of_context
from datastore.mounting.places import cache_root

_STYLE = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}


def doctor_command(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="YAML file; the storage of its Datastores is checked too.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Check only this Datastore of the file.", autocompletion=complete_datastores
        ),
    ] = None,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster", help="Check a Datastore in the cluster of kubectl's context; give its name in place of FILE."
        ),
    ] = False,
    namespace: Namespace = "",
    output: Output = Format.TABLE,
) -> None:
    """Check this machine, and the storage of a manifest. The exit code is that of the last check that failed, or 0."""
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
    return cluster_checks(of_context(os.environ, namespace), name)


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
            else bad(datastore.name, f"{path} is not a directory", "correct spec.local.path", ExitCode.MOUNT)
        )
        return
    say_credentials(manifest, datastore)
    source = source_in(manifest, datastore)
    # Not imported at the top: what asks a storage takes up to a second to load, and is needed only here.
    if isinstance(source, S3Location):
        from datastore.cli.storechecks import store_checks

        spec = datastore.spec
        yield from store_checks(
            datastore.name, source, read_only=spec.read_only, conflict_fails=spec.conflict == "fail"
        )
    elif isinstance(source, NFSLocation):
        from datastore.cli.fileserverchecks import nfs_check

        yield nfs_check(datastore.name, source)
    elif isinstance(source, SFTPLocation):
        from datastore.cli.fileserverchecks import sftp_check

        yield sftp_check(datastore.name, source)
    elif isinstance(source, GlusterFSLocation):
        yield _glusterfs(datastore.name, source)


def _glusterfs(name: str, source: GlusterFSLocation) -> Finding:
    if shutil.which("glusterfs") is None:
        return bad(name, "glusterfs is missing", "apt-get install glusterfs-client", ExitCode.MOUNT)
    try:
        server = glusterfs.find(source)
    except DatastoreError as error:
        return bad(name, str(error), "correct spec.glusterfs; gluster volume info on a server", exit_code_for(error))
    served = f"{source}: {server} serves the volume"
    if os.geteuid():
        return warn(name, f"{served}; GlusterFS's own client mounts it for root only", "mount it with sudo")
    return ok(name, served)


def _print(finding: Finding) -> None:
    line = Text()
    line.append(f"{finding.level.value:<4}", style=_STYLE[finding.level])
    line.append(f"  {finding.check}: {one_line(finding.text)}")
    if finding.todo:
        line.append(f"\n      to do: {one_line(finding.todo)}")
    Console(soft_wrap=True, highlight=False).print(line)
