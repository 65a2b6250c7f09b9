"""`datastore model export NAME[:VERSION|ALIAS] TARGET`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from datastore.api.manifest import Manifest
from datastore.cli.console import note
from datastore.cli.model.oncluster import OnCluster, export_on_cluster
from datastore.cli.model.places import Endpoint, File, Store, open_store, open_target
from datastore.cli.model.show import Reference
from datastore.cli.model.work import ProgressOption, Shown, run
from datastore.errors import AlreadyExists
from datastore.models.exporting import export_directory, export_tar, export_tar_file, export_tree
from datastore.models.manifest import VersionManifest
from datastore.models.names import parse_reference
from datastore.models.ocilayout import export_layout
from datastore.models.progress import Progress
from datastore.models.registry import Models
from datastore.units import format_count, format_size

_ARCHIVES = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip", ".7z")
"""Endings of files that no export makes."""
_REMOTE = ("s3://", "datastore://")


def export_command(
    reference: Reference,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A new directory; FILE.tar, or - for a tar on standard output; s3://BUCKET/PREFIX; "
            "datastore://NAME/path; oci:DIR for an OCI image layout.",
        ),
    ],
    file: File = None,
    store: Store = None,
    endpoint: Endpoint = "",
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            metavar="DIR",
            help="With oci:DIR: directory with the OCI layout of an image on which the version is put.",
        ),
    ] = None,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Export with a Job of the cluster to DATASTORE/path, or to the s3:// address of a Datastore; it "
            "makes a tar file if TARGET ends with .tar, and an image layout with oci:...",
        ),
    ] = False,
    namespace: OnCluster = "",
    wait: Annotated[
        bool,
        typer.Option("--wait", help="With --cluster: wait until the version is exported, and show a progress bar."),
    ] = False,
    progress: ProgressOption = Shown.AUTO,
) -> None:
    """Copy a version to another place. Every byte is compared with what was saved."""
    asked = parse_reference(reference)
    _check_target(target, cluster)
    if cluster:
        export_on_cluster(asked, target, namespace, wait, progress)
        return
    if base is not None and not target.startswith("oci:"):
        raise typer.BadParameter("--base is for oci:DIR")
    with open_store(file, store) as opened:
        _check_is_local(target, opened.manifest)
        models = opened.models
        number = models.resolve(asked)

        def job(told: Progress) -> VersionManifest:
            return _export(models, asked.model, number, target, told)

        def layout(told: Progress) -> VersionManifest:
            return export_layout(models, asked.model, number, _path(target.removeprefix("oci:")), told, base=base)

        try:
            if target.startswith(_REMOTE):
                with open_target(target, file, endpoint) as tree:
                    manifest = run(lambda told: export_tree(models, asked.model, number, tree, told), progress)
            else:
                manifest = run(layout if target.startswith("oci:") else job, progress)
        except AlreadyExists as error:
            raise typer.BadParameter(str(error)) from error
    size = f"{format_count(manifest.files, 'file')}, {format_size(manifest.size_bytes)}, {manifest.digest}"
    note(f"{asked.model}:{number} is at {target}: {size}")


def _check_target(target: str, cluster: bool) -> None:
    """Errors: typer.BadParameter for a file or an address that no export makes; it would become a directory here."""
    if target.startswith("oci:"):
        return
    if "://" in target and not target.startswith(_REMOTE):
        raise typer.BadParameter(f"{target}: an export goes to a directory, FILE.tar, s3://, datastore:// or oci:DIR")
    if target.lower().endswith(_ARCHIVES):
        raise typer.BadParameter(f"{target}: an export is a directory, FILE.tar, which is not compressed, or oci:DIR")
    if target.startswith(_REMOTE) and target.endswith(".tar") and not cluster:
        raise typer.BadParameter(
            f"{target}: a tar file is written to this machine; export to FILE.tar and copy that, or let a Job of the "
            "cluster write it (--cluster)"
        )


def _check_is_local(target: str, manifest: Manifest) -> None:
    """Errors: typer.BadParameter for DATASTORE/path, which `save --from` and --cluster take, where no directory is."""
    name = target.partition("/")[0]
    if any(each.name == name for each in manifest.datastores) and not os.path.isdir(name):
        raise typer.BadParameter(
            f"{target}: {name} is a Datastore of {manifest.source}; write datastore://{target} for a place in it, or "
            f"./{target} for one on this machine"
        )


def _export(models: Models, model: str, number: int, target: str, told: Progress) -> VersionManifest:
    if target == "-":
        return export_tar(models, model, number, sys.stdout.buffer, told)
    if not target.endswith(".tar"):
        return export_directory(models, model, number, _path(target), told)
    return export_tar_file(models, model, number, _path(target), told)


def _path(text: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(text)))
