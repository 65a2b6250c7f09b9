"""`datastore model save NAME --from DATASTORE/path`."""

from __future__ import annotations

from typing import Annotated

import typer

from datastore.cli.arguments import Output
from datastore.cli.console import Format, note, print_json
from datastore.cli.model.oncluster import OnCluster, save_on_cluster
from datastore.cli.model.places import Endpoint, File, Store, open_source, open_store
from datastore.cli.model.show import document_of
from datastore.cli.model.work import ProgressOption, Shown, run
from datastore.models.manifest import Lineage
from datastore.models.names import check_model
from datastore.models.saving import Saved, Wish, save
from datastore.units import format_count, format_size

Labels = Annotated[
    list[str] | None, typer.Option("--label", "-l", metavar="NAME=VALUE", help="Label of the version; can be repeated.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Make a new version even if the bytes are the same as in the newest one.")
]
SaveId = Annotated[
    str, typer.Option("--save-id", help="Id of the save; a save that is repeated with it is done once.", hidden=True)
]


def save_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="What is saved: DATASTORE/path, a directory (./runs/7, /data, ~/x) or s3://BUCKET/PREFIX.",
        ),
    ],
    file: File = None,
    store: Store = None,
    label: Labels = None,
    force: Force = False,
    follow_links: Annotated[
        bool,
        typer.Option(
            "--follow-links",
            help="Of a directory: save the file in place of a link that leads out, as in a Hugging Face snapshot.",
        ),
    ] = False,
    endpoint: Endpoint = "",
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Save the version with a Job of the cluster. SOURCE is then DATASTORE/path, of a Datastore in the "
            "cluster.",
        ),
    ] = False,
    namespace: OnCluster = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="With --cluster: wait until the version is saved, and show a progress bar.")
    ] = False,
    training_job: Annotated[str, typer.Option(hidden=True)] = "",
    training_job_uid: Annotated[str, typer.Option(hidden=True)] = "",
    training_command: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    image_digest: Annotated[str, typer.Option(hidden=True)] = "",
    save_id: SaveId = "",
    progress: ProgressOption = Shown.AUTO,
    output: Output = Format.TABLE,
) -> None:
    """Save a directory as the next version of a model."""
    check_model(name)
    labels = parse_labels(label)
    if cluster:
        save_on_cluster(name, source, labels, force, namespace, wait, progress, output)
        return
    with (
        open_store(file, store, to_write=True) as opened,
        open_source(source, file, endpoint, follow_links=follow_links) as (tree, datastore, path),
    ):
        lineage = Lineage(
            datastore=datastore,
            path=path,
            location=tree.location,
            training_job=training_job,
            training_job_uid=training_job_uid,
            image_digest=image_digest,
            command=tuple(training_command or ()),
        )
        wish = Wish(model=name, lineage=lineage, labels=labels, force=force, save_id=save_id)
        tell(run(lambda told: save(opened.models, tree, wish, told), progress), output)


def parse_labels(given: list[str] | None) -> dict[str, str]:
    """Return the labels given as NAME=VALUE. Errors: typer.BadParameter."""
    labels = {}
    for each in given or []:
        name, equals, value = each.partition("=")
        if not (name and equals) or not each.isprintable():
            raise typer.BadParameter(f"--label {each}: write NAME=VALUE")
        labels[name] = value
    return labels


def tell(saved: Saved, output: Format) -> None:
    """Print the result of a save or an import."""
    manifest = saved.manifest
    if output is Format.JSON:
        print_json({**document_of(manifest), "new": saved.new})
        return
    of = f"{format_count(manifest.files, 'file')}, {format_size(manifest.size_bytes)}, {manifest.digest}"
    if not saved.new:
        note(f"{manifest.model}:{manifest.version} holds the same bytes already, so no version was made ({of})")
        return
    resumed = (
        f"; {format_count(saved.resumed_files, 'file')} of an interrupted save taken over"
        if saved.resumed_files
        else ""
    )
    note(f"{manifest.model}:{manifest.version} is saved: {of}{resumed}")
