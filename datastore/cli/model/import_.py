"""`datastore model import NAME SOURCE`."""

from __future__ import annotations

from typing import Annotated

import typer

from datastore.cli.arguments import Output
from datastore.cli.console import Format
from datastore.cli.model.places import Endpoint, File, Store, open_import, open_store
from datastore.cli.model.save import Force, Labels, parse_labels, tell
from datastore.cli.model.work import ProgressOption, Shown, run
from datastore.models.manifest import Lineage
from datastore.models.names import check_model
from datastore.models.saving import Wish, save


def import_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")],
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A directory; FILE.tar or FILE.tar.gz; s3://BUCKET/PREFIX; datastore://NAME/path; oci:DIR for an "
            "OCI image layout.",
        ),
    ],
    file: File = None,
    store: Store = None,
    label: Labels = None,
    force: Force = False,
    endpoint: Endpoint = "",
    progress: ProgressOption = Shown.AUTO,
    output: Output = Format.TABLE,
) -> None:
    """Make a version from a directory, a tar file or an image. An exported version is refused if it was changed."""
    check_model(name)
    labels = parse_labels(label)
    with (
        open_store(file, store, to_write=True) as opened,
        open_import(source, file, endpoint) as (tree, version, digest),
    ):
        said = f"{source} ({version} {digest})" if digest else source
        lineage = Lineage(location=tree.location, imported_from=said)
        wish = Wish(model=name, lineage=lineage, labels=labels, force=force, digest=digest)
        tell(run(lambda told: save(opened.models, tree, wish, told), progress), output)
