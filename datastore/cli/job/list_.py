"""`datastore job list`."""

from __future__ import annotations

from datetime import UTC, datetime

from datastore.cli.arguments import Output
from datastore.cli.console import Format, print_columns, print_json
from datastore.cli.job.drivers import DEFAULT, AllNamespaces, InNamespace, as_json, everywhere
from datastore.cli.job.shown import LIST, list_row


def list_command(
    namespace: InNamespace = DEFAULT,
    all_namespaces: AllNamespaces = False,
    output: Output = Format.TABLE,
) -> None:
    """List the TrainingJobs of this user on this machine and those of the cluster, including finished ones."""
    found = [each for _, each in everywhere(namespace, all_namespaces)]
    if output is Format.JSON:
        print_json([as_json(each) for each in found])
        return
    none = "there is no TrainingJob yet; submit one with `datastore job submit -f FILE`"
    print_columns(LIST, [list_row(each, datetime.now(UTC)) for each in found], if_empty=none)
