"""`datastore job convert -f FILE`."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer
import yaml

from datastore.api.manifest import documents, parse
from datastore.api.trainingjob import KIND
from datastore.cli.console import note, print_json
from datastore.errors import InvalidManifest
from datastore.training.convert import KINDS, convert


def convert_command(
    file: Annotated[
        str, typer.Option("--file", "-f", metavar="FILE", help=f"YAML file with jobs of Kubeflow: {', '.join(KINDS)}.")
    ],
    output: Annotated[Literal["yaml", "json"], typer.Option("--output", "-o", help="Format of the output.")] = "yaml",
) -> None:
    """Convert a job of Kubeflow: print a TrainingJob and its Datastores. Notes on standard error say what to check."""
    made = []
    for document in documents(file):
        if document.get("kind") in KINDS:
            converted = convert(document)
            made += converted.documents
            for each in converted.notes:
                note(f"{converted.documents[0]['metadata']['name']}: {each}")
    if not made:
        raise InvalidManifest(f"{file}: holds none of {', '.join(KINDS)}")
    text = yaml.safe_dump_all(made, sort_keys=False)
    parse(text, "what was made of it", KIND)
    if output == "json":
        print_json(made)
    else:
        sys.stdout.write(text)
