"""`datastore job suspend NAME` and `datastore job resume NAME`."""

from __future__ import annotations

from datastore.cli.arguments import Output
from datastore.cli.console import Format, note, print_json
from datastore.cli.job.drivers import DEFAULT, Name, Namespace, as_json
from datastore.training.launchers import existing


def suspend_command(name: Name, namespace: Namespace = DEFAULT, output: Output = Format.TABLE) -> None:
    """Stop a TrainingJob and free its resources; `resume` continues it from its checkpoints."""
    _set(name, namespace, True, output)


def resume_command(name: Name, namespace: Namespace = DEFAULT, output: Output = Format.TABLE) -> None:
    """Run a suspended TrainingJob again."""
    _set(name, namespace, False, output)


def _set(name: str, namespace: str, suspended: bool, output: Format) -> None:
    driver, namespace = existing(name, namespace, note)
    driver.suspend(name, namespace, suspended=suspended)
    if output is Format.JSON:
        print_json(as_json(driver.observe(name, namespace)))
    else:
        note(f"{name} is suspended" if suspended else f"{name} runs again")
