"""`datastore model mount NAME:VERSION DIR`."""

from __future__ import annotations

from typing import Annotated

import typer

from datastore.cli.console import note
from datastore.cli.model.places import File, Store, open_store
from datastore.cli.model.show import Reference
from datastore.cli.model.work import ProgressOption, Shown, verified
from datastore.cli.mountarguments import (
    DEFAULT_MEMORY,
    DEFAULT_TRANSPORT,
    AllowOther,
    Gid,
    Memory,
    Metrics,
    Transport,
    Uid,
    Umask,
    mount_options,
)
from datastore.models.names import parse_reference
from datastore.models.place import version_datastore
from datastore.models.storage import compare
from datastore.mounting import lifecycle
from datastore.mounting.directory import real_path
from datastore.mounting.signals import watching


def mount_command(
    reference: Reference,
    directory: Annotated[
        str | None,
        typer.Argument(metavar="DIR", help="Directory to mount at; it is made if missing. Default: ./NAME-VERSION."),
    ] = None,
    file: File = None,
    store: Store = None,
    check: Annotated[
        bool, typer.Option("--verify", help="Read every byte first, and refuse a damaged version.")
    ] = False,
    transport: Transport = DEFAULT_TRANSPORT,
    allow_other: AllowOther = False,
    metrics: Metrics = "",
    memory: Memory = DEFAULT_MEMORY,
    uid: Uid = "",
    gid: Gid = "",
    umask: Umask = "",
    progress: ProgressOption = Shown.AUTO,
) -> None:
    """Mount a version as a directory, read-only; `datastore umount` unmounts it."""
    asked = parse_reference(reference)
    options = mount_options(True, allow_other, transport, metrics, memory, uid, gid, umask)
    with open_store(file, store) as opened:
        models = opened.models
        number = models.resolve(asked)
        if check:
            verified(models, asked.model, number, "mounted", progress)
        else:
            tree = models.tree(asked.model, number)
            compare(tree.location, models.manifest(asked.model, number).entries, tree.scan())
    datastore = version_datastore(opened.datastore, asked.model, number)
    with watching() as watch:
        record = lifecycle.mount(opened.manifest, datastore, real_path(directory or datastore.name), options, watch)
    note(f"{asked.model}:{number} ({record.location}) is mounted at {record.mountpoint}, read-only")
