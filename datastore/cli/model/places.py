"""The places that a command line names: the store of models, and where directories are read from or written to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from datastore import controlclient
from datastore.api.datastore import Datastore
from datastore.api.manifest import Manifest, load
from datastore.api.names import DEFAULT_STORE
from datastore.api.resolve import MountOptions, source_in
from datastore.api.source import LocalLocation, S3Location, Source
from datastore.cli.console import note
from datastore.cli.mount import say_credentials
from datastore.errors import InvalidManifest
from datastore.models.archives import open_layout, open_tar
from datastore.models.errors import SourceInvalid
from datastore.models.opening import located, opened_storage, opened_tree
from datastore.models.registry import Models
from datastore.models.storage import ReadableTree, Tree
from datastore.mounting import lifecycle, unmounting
from datastore.mounting.errors import Unsynced
from datastore.mounting.records import all_records
from datastore.mounting.signals import watching

FLUSH_TIMEOUT_S = 600.0
"""As long as an unmount waits for the uploads (unmounting.STOP_TIMEOUT_S)."""
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz")

File = Annotated[
    str | None,
    typer.Option(
        "--file",
        "-f",
        envvar="DATASTORE_FILE",
        metavar="FILE",
        help="YAML file with the Datastores; - means standard input.",
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="DATASTORE_STORE",
        metavar="NAME",
        help=f"Datastore of the file that holds the models. Default: the one named {DEFAULT_STORE}, or the only one.",
    ),
]
Endpoint = Annotated[
    str,
    typer.Option(
        "--endpoint", envvar="AWS_ENDPOINT_URL", metavar="URL", help="URL of the server of s3://... Default: AWS."
    ),
]


@dataclass(frozen=True, slots=True)
class OpenStore:
    """The store of models that a command works on, the Datastore that holds it, and the loaded manifest."""

    manifest: Manifest
    datastore: Datastore
    models: Models


@contextmanager
def open_store(file: str | None, store: str | None, *, to_write: bool = False) -> Iterator[OpenStore]:
    """Open the store in the Datastore that holds models. Errors: InvalidManifest, StoreError, MountFailed."""
    manifest = manifest_in(file)
    datastore = manifest.pick_store(store)
    if to_write:
        manifest.check_writable(datastore)
    say_credentials(manifest, datastore)
    with reached(manifest, datastore) as (source, location), opened_storage(source, location) as storage:
        yield OpenStore(manifest, datastore, Models(storage))


def manifest_in(file: str | None) -> Manifest:
    """Load the manifest. Errors: InvalidManifest, also when no file is named."""
    if file is None:
        raise InvalidManifest("name the file with the Datastores: -f FILE, or DATASTORE_FILE in the environment")
    return load(file)


@contextmanager
def open_source(
    text: str, file: str | None, endpoint: str, *, follow_links: bool = False
) -> Iterator[tuple[ReadableTree, str, str]]:
    """Open what is to be saved: DATASTORE/path, a directory (begins with '/', '.' or '~'), or s3://bucket/prefix.

    Yield its tree, the name of the Datastore, and the path in it; both are '' outside a Datastore. follow_links: see
    opened_tree().
    """
    if text.startswith("s3://"):
        bucket, path = _s3(text, endpoint)
        with opened_tree(bucket, path) as tree:
            yield tree, "", ""
        return
    if text.startswith(("/", ".", "~")):
        place = LocalLocation(path=os.path.realpath(os.path.expanduser(text)))
        with opened_tree(place, "", follow_links=follow_links) as tree:
            yield tree, "", ""
        return
    name, _, path = text.removeprefix("datastore://").partition("/")
    manifest = manifest_in(file)
    try:
        datastore = manifest.pick(name)
    except InvalidManifest as error:
        hint = f"; for the directory write ./{text}" if Path(text).exists() else ""
        raise InvalidManifest(f"{error}{hint}") from None
    say_credentials(manifest, datastore)
    upload_rest(datastore)
    with reached(manifest, datastore) as (source, location), opened_tree(source, path, location) as tree:
        yield tree, name, path.strip("/")


@contextmanager
def open_import(text: str, file: str | None, endpoint: str) -> Iterator[tuple[ReadableTree, str, str]]:
    """Open what is to be imported. Yield its tree, and the version and digest that it claims, '' if it claims none."""
    if text.startswith("oci:"):
        with open_layout(Path(text.removeprefix("oci:")).expanduser()) as archive:
            yield archive, *archive.said
    elif text.endswith(TAR_ENDINGS) and not text.startswith(("s3://", "datastore://")):
        with open_tar(Path(text).expanduser()) as archive:
            archive.scan()
            yield archive, *archive.said
    else:
        known = text if text.startswith(("s3://", "datastore://")) else os.path.abspath(os.path.expanduser(text))
        if os.path.isfile(known):
            raise SourceInvalid(
                f"{text}: is no directory, and no archive whose name ends with {', '.join(TAR_ENDINGS)}; "
                "unpack it, and import the directory"
            )
        with open_source(known, file, endpoint) as (tree, _, _):
            yield tree, "", ""


@contextmanager
def open_target(text: str, file: str | None, endpoint: str) -> Iterator[Tree]:
    """Open s3://bucket/prefix or datastore://NAME/path for writing."""
    if text.startswith("s3://"):
        bucket, path = _s3(text, endpoint)
        with opened_tree(bucket, path, writable=True) as tree:
            yield tree
        return
    name, _, path = text.removeprefix("datastore://").partition("/")
    manifest = manifest_in(file)
    datastore = manifest.pick(name)
    manifest.check_writable(datastore)
    say_credentials(manifest, datastore)
    with reached(manifest, datastore) as (source, location), opened_tree(source, path, location, writable=True) as tree:
        yield tree


def upload_rest(datastore: Datastore) -> None:
    """Have this machine's mounts of a Datastore upload their closed files, as its bucket is read without the mounts.

    Errors: Unsynced, naming what can't be uploaded; NotAnswering.
    """
    for record in all_records():
        if not datastore.spec.s3 or record.location != datastore.location or record.read_only or record.in_kernel:
            continue
        if record.ended:
            raise Unsynced(
                f"{record.mountpoint}: changes of {datastore.name} there are not uploaded; see datastore unsent"
            )
        answer = controlclient.ask(record.state_dir, {"op": "flush"}, FLUSH_TIMEOUT_S)
        if answer["ok"] is not True:
            told = answer.get("errors") or [answer.get("error", "no reason given")]
            raise Unsynced(f"{record.mountpoint}: changes of {datastore.name} there are not uploaded: {told[0]}")


@contextmanager
def reached(manifest: Manifest, datastore: Datastore) -> Iterator[tuple[Source, str]]:
    """Yield where a Datastore's data is: buckets and local directories as they are, others mounted for the block, with
    the location of what is mounted."""
    source = source_in(manifest, datastore)
    if isinstance(source, S3Location | LocalLocation):
        yield source, ""
        return
    with ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"datastore-{datastore.name}-"))
        place = os.path.join(place, datastore.name)
        watch = stack.enter_context(watching())
        record = lifecycle.mount(manifest, datastore, place, MountOptions(), watch, ends_with_us=True)
        stack.callback(unmounting.unmount, record, say=note)
        location = datastore.location.rstrip("/")
        yield stack.enter_context(located(place, location)), location


def _s3(text: str, endpoint: str) -> tuple[S3Location, str]:
    """Return the bucket and the prefix that a URL names; the bucket is used with the keys of the default chain."""
    parts = urlsplit(text)
    if not parts.netloc:
        raise typer.BadParameter(f"{text}: write s3://BUCKET/PREFIX")
    prefix = parts.path.strip("/")
    return S3Location(bucket=parts.netloc, endpoint=endpoint.rstrip("/")), prefix
