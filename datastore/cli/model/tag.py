"""`datastore model tag NAME:VERSION ALIAS`."""

from __future__ import annotations

from typing import Annotated

import typer

from datastore.cli.console import note
from datastore.cli.model.oncluster import OnCluster, tag_on_cluster
from datastore.cli.model.places import File, Store, open_store
from datastore.cli.model.show import Reference
from datastore.models.names import check_alias, parse_reference


def tag_command(
    reference: Reference,
    alias: Annotated[str, typer.Argument(metavar="ALIAS", help="Name of the alias, such as prod or canary.")],
    file: File = None,
    store: Store = None,
    expect: Annotated[
        int | None,
        typer.Option(
            "--expect",
            min=0,
            metavar="VERSION",
            help="Move the alias only if it now names this version; 0: only if there is no such alias yet.",
        ),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the alias of this model.")] = False,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Set the alias in the Model of the cluster; Servings with this alias follow."),
    ] = False,
    namespace: OnCluster = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="With --cluster: wait until the alias is moved in the store.")
    ] = False,
) -> None:
    """Move an alias to a version, or remove it. All users of the alias get the new version at once."""
    asked = parse_reference(reference)
    check_alias(alias)
    if cluster:
        tag_on_cluster(asked, alias, namespace, expect, remove, wait)
        return
    with open_store(file, store, to_write=True) as opened:
        if remove:
            opened.models.remove_alias(asked.model, alias)
            note(f"{asked.model} has no alias {alias} any more")
            return
        number = opened.models.resolve(asked)
        before = opened.models.set_alias(asked.model, alias, number, expected=expect)
    note(f"{asked.model}:{alias} means version {number}" + (f" (it was {before})" if before else ""))
