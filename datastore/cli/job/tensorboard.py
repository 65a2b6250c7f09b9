"""`datastore job tensorboard NAME`: by this machine's TensorBoard, or by a pod of the cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from datastore.cli.console import note
from datastore.cli.job.drivers import DEFAULT, Name, Namespace
from datastore.cli.run import run_to_the_end
from datastore.mounting.signals import watching
from datastore.training.cluster.board import forwarding, wanted
from datastore.training.cluster.driver import KubernetesDriver
from datastore.training.launchers import existing
from datastore.training.local.board import log_directory, program
from datastore.training.results import tensorboard_arguments


def tensorboard_command(
    name: Name,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1 at which TensorBoard is served.")
    ] = 6006,
    datastore: Annotated[
        str,
        typer.Option(
            "--datastore", metavar="NAME", help="Datastore with the event files. Default: what spec.tensorboard says."
        ),
    ] = "",
    path: Annotated[
        str,
        typer.Option(
            "--path", metavar="PATH", help="With --datastore: directory in it with the event files. Default: all of it."
        ),
    ] = "",
    namespace: Namespace = DEFAULT,
) -> None:
    """Run TensorBoard over the event files of a TrainingJob, until Ctrl-C."""
    driver, namespace = existing(name, namespace)
    if isinstance(driver, KubernetesDriver):
        _in_cluster(driver, name, namespace, port, datastore, path.strip("/"))
        return
    tensorboard = program()
    with watching() as watch, log_directory(name, namespace, datastore, path.strip("/"), watch) as directory:
        code = run_to_the_end([tensorboard, *tensorboard_arguments(str(directory), port)], watch)
    raise typer.Exit(code)


def _in_cluster(driver: KubernetesDriver, name: str, namespace: str, port: int, datastore: str, path: str) -> None:
    """Have kubectl forward a port to the TensorBoard in the cluster, with the rights of the user."""
    command = forwarding(name, namespace, port)
    with watching() as watch, wanted(driver.client, name, namespace, datastore, path, watch):
        note(f"TensorBoard of {name} is at the first address that follows; Ctrl-C ends it")
        code = run_to_the_end(command, watch)
    raise typer.Exit(code)
