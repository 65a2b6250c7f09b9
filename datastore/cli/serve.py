"""`datastore serve NAME[:VERSION|ALIAS] -- COMMAND...`: verify a version, mount it read-only, run what serves it."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

from datastore.api.model import DEFAULT_IMAGE, DEFAULT_PATH, DEFAULT_PORTS
from datastore.cli.console import note
from datastore.cli.model.places import File, OpenStore, Store, open_store
from datastore.cli.model.show import Reference
from datastore.cli.model.work import ProgressOption, Shown, verified
from datastore.cli.mountarguments import DEFAULT_TRANSPORT, Transport, TransportChoice, mount_options
from datastore.cli.run import run_to_the_end, unmount_all
from datastore.errors import DatastoreError, StoreError
from datastore.models.manifest import VersionManifest
from datastore.models.names import parse_reference
from datastore.models.owner import identity
from datastore.models.place import version_datastore
from datastore.models.registry import Models, Use
from datastore.mounting import lifecycle, podman
from datastore.mounting.signals import watching

PROGRAM = "tensorflow_model_server"
ENGINES = ("podman", "docker")


class Server(NamedTuple):
    """The command that serves. as_another_user: it reads the mount as another user, who must be let in. engine: what
    runs it in a container, or ''."""

    command: list[str]
    as_another_user: bool = False
    engine: str = ""


def serve_command(
    reference: Reference,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND",
            help=f"Server to run, with its arguments, after --. Default: {PROGRAM} of this machine, or --image.",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            "-p",
            min=1,
            max=65535,
            help="Port on which the server listens. Default: 8500, with --protocol http 8501.",
        ),
    ] = None,
    protocol: Annotated[
        Literal["grpc", "http"], typer.Option(help="Protocol of the server, on which the default of --port depends.")
    ] = "grpc",
    image: Annotated[
        str,
        typer.Option(
            help="Image that podman or docker runs without COMMAND. The default is only run if this machine lacks "
            "tensorflow_model_server."
        ),
    ] = DEFAULT_IMAGE,
    file: File = None,
    store: Store = None,
    transport: Transport = DEFAULT_TRANSPORT,
    progress: ProgressOption = Shown.AUTO,
) -> None:
    """Serve a version of a model on this machine until Ctrl-C.

    Every byte is verified first, then the version is mounted read-only. The exit code is the server's.
    The server finds the version by its environment, as in the pods of a Serving:
    DATASTORE_MODEL_PATH, DATASTORE_PORT, DATASTORE_MODEL and DATASTORE_MODEL_VERSION.
    """
    asked = parse_reference(reference)
    listens = port or DEFAULT_PORTS[protocol]
    _check_free(listens)
    with open_store(file, store) as opened:
        number = opened.models.resolve(asked)
        manifest = verified(opened.models, asked.model, number, "served", progress)
        with _in_use(opened.models, asked.model, number):
            code = _run(opened, manifest, listens, transport, command, protocol, image)
    raise typer.Exit(code)


def _run(
    opened: OpenStore,
    manifest: VersionManifest,
    port: int,
    transport: TransportChoice,
    command: list[str] | None,
    protocol: str,
    image: str,
) -> int:
    """Mount the version, run the server until it ends, and unmount; return the exit code."""
    model, number = manifest.model, manifest.version
    folder = Path(tempfile.mkdtemp(prefix="datastore-serve-"))
    # TensorFlow Serving looks for numbered directories below the one that it is given.
    place = folder / model / str(number)
    try:
        server = Server(command) if command else default_server(place, port, protocol, image)
        with watching() as watch:
            options = mount_options(True, server.as_another_user, transport)
            datastore = version_datastore(opened.datastore, model, number)
            record = lifecycle.mount(opened.manifest, datastore, str(place), options, watch, ends_with_us=True)
            try:
                watch.check()
                podman.check_sees(server.engine, {DEFAULT_PATH: str(place)})
                variables = {
                    "DATASTORE_MODEL": model,
                    "DATASTORE_MODEL_VERSION": str(number),
                    "DATASTORE_MODEL_PATH": str(place),
                    "DATASTORE_PORT": str(port),
                }
                begun = (
                    f"the server of {model}:{number} ({manifest.digest}) has started, for port {port}; Ctrl-C ends it"
                )
                code = run_to_the_end(server.command, watch, variables, begun, [record])
            finally:
                ended = unmount_all([record], watch)
    finally:
        for each in (place, place.parent, folder):
            if each.is_dir() and not os.path.ismount(each):
                each.rmdir()
    return code or ended


def _check_free(port: int) -> None:
    """Errors: DatastoreError if another program listens on the port."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # others, as of a port that only root may use, are the server's to tell
            raise DatastoreError(
                f"another program on this machine listens on port {port}; name another port with --port"
            ) from error


@contextmanager
def _in_use(models: Models, model: str, number: int) -> Iterator[None]:
    """Record in the store that the version is served while the block runs; if that fails, only print a note."""
    use = Use(id=f"serve-{secrets.token_hex(8)}", who=f"datastore serve on {socket.gethostname()}", process=identity())
    try:
        models.add_use(model, number, use)
    except StoreError as error:
        note(f"the store does not know that {model}:{number} is served here: {error}")
        yield
        return
    try:
        yield
    finally:
        try:
            models.remove_use(model, number, use.id)
        except StoreError as error:
            note(f"the store still has {model}/uses/{number}/{use.id}, which nobody needs any more: {error}")


def default_server(place: Path, port: int, protocol: str, image: str) -> Server:
    """Return TensorFlow Serving, if installed, else its image run by podman or docker. Errors: DatastoreError."""
    if image == DEFAULT_IMAGE and (found := shutil.which(PROGRAM)):
        grpc, http = (port, 0) if protocol == "grpc" else (0, port)
        ports = [f"--port={grpc}", f"--rest_api_port={http}"]
        return Server([found, *ports, "--model_name=model", f"--model_base_path={place.parent}"])
    engine = next((found for name in ENGINES if (found := shutil.which(name))), None)
    if engine is None:
        raise DatastoreError(
            f"there is neither {PROGRAM} nor {' nor '.join(ENGINES)} on this machine; say what serves after --, "
            "e.g. -- python server.py"
        )
    inside = DEFAULT_PORTS[protocol]
    variables = {
        "DATASTORE_MODEL_PATH": DEFAULT_PATH,
        "DATASTORE_MODEL_VERSION": place.name,
        "DATASTORE_MODEL": place.parent.name,
        "DATASTORE_PORT": str(inside),
    }
    given = [f"--env={name}={value}" for name, value in variables.items()]
    shown = [f"--publish={port}:{inside}", f"--volume={place}:{DEFAULT_PATH}:ro"]
    # The containers of a plain user's podman read the files as that user.
    as_another_user = os.getuid() == 0 or engine.endswith("docker")
    return Server([engine, "run", "--rm", "--init", *shown, *given, image], as_another_user, engine)
