"""All verbs, and the only place where an error becomes a line and an exit code."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module

import typer

from datastore.cli.console import fail
from datastore.cli.exitcodes import ExitCode, exit_code_for
from datastore.cli.version import version_option
from datastore.errors import DatastoreError
from datastore.mounting.signals import Interrupted

HELP = """S3 buckets, NFS exports and directories of SSH servers as local directories, to train and serve models from.

Begin with `datastore mount FILE`, where FILE is a YAML manifest of kind
Datastore, which says where the data is. kubectl apply takes the same file. If
something is wrong, `datastore doctor FILE` says what. Exit codes and all
options: docs/reference/cli.md.
"""

VERBS = {
    "mount": "mount:mount_command",
    "umount": "umount:umount_command",
    "unmount": "umount:umount_command",
    "restart": "restart:restart_command",
    "list": "list_:list_command",
    "status": "status:status_command",
    "top": "top:top_command",
    "unsent": "unsent:unsent_command",
    "warm": "warm:warm_command",
    "run": "run:run_command",
    "serve": "serve:serve_command",
    "doctor": "doctor:doctor_command",
    "model": "model.app:app",
    "remove-finalizer": "removefinalizer:remove_finalizer_command",
    "job": "job.app:app",
    "crd": "crd:crd_command",
    "version": "version:version_command",
}
"""Where each verb is: a module of this package, and the function or typer application in it. In the order of --help."""
_HIDDEN = "unmount"
_STARTS_ANOTHER = "run"
"""The options of this verb end where the command that it runs begins."""


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """Return the application; if the arguments begin with a verb, only with that: importing all takes half a second."""
    app = typer.Typer(
        name="datastore",
        help=HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(version_option)
    first = [each.removeprefix("--") for each in arguments[:1]]  # `--version` needs what `version` needs
    for verb in first if VERBS.keys() & first else VERBS:
        module, _, name = VERBS[verb].partition(":")
        found = getattr(import_module(f"datastore.cli.{module}"), name)
        if isinstance(found, typer.Typer):
            app.add_typer(found)
            continue
        settings = {"allow_interspersed_args": verb != _STARTS_ANOTHER}
        app.command(verb, hidden=verb == _HIDDEN, context_settings=settings)(found)
    _show_whole_sentences(app)
    return app


def _show_whole_sentences(app: typer.Typer) -> None:
    """Have --help show the first sentence of each verb whole; typer would cut it to fit on one line."""
    for verb in app.registered_commands:
        verb.short_help = re.split(r"(?<=\.)\s", (verb.callback.__doc__ or "").strip(), maxsplit=1)[0]
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _show_whole_sentences(group.typer_instance)


def run(arguments: Sequence[str]) -> object:
    """Run a verb with its arguments and return its exit code, or None. Errors: those of the verb."""
    return app_for(arguments)(list(arguments), standalone_mode=False)


def exit_code_of(run_verb: Callable[[], object], came: Sequence[int] = ()) -> int:
    """Run a verb; return its exit code. An error is printed as one line, and with a traceback if DATASTORE_DEBUG=1.

    came: the SIGINTs that have come, as signals.keyboard() yields them.
    """
    try:
        code = run_verb()
        if came and code == ExitCode.INTERRUPTED:
            fail("interrupted")  # typer has turned the KeyboardInterrupt into this code
        return code if isinstance(code, int) else ExitCode.OK
    except Interrupted as interrupted:
        fail(str(interrupted))
        return interrupted.exit_code
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed the pipe; the interpreter must not try to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.ERROR
    except Exception as error:
        if not came:
            return _failed(error)
        fail("interrupted")  # a library may have turned the KeyboardInterrupt into this error
        return ExitCode.INTERRUPTED


def _failed(error: Exception) -> int:
    if os.environ.get("DATASTORE_DEBUG") == "1":
        traceback.print_exc()
    describe = getattr(error, "format_message", None)
    if callable(describe):
        # A usage error of typer describes what is wrong, or is the help if there is no argument.
        text, context = describe(), getattr(error, "ctx", None)
        if context is not None and text == context.get_help():
            sys.stdout.write(text + "\n")
        else:
            fail(f"{text.replace('Value error, ', '')} (see --help)")
        return ExitCode.USAGE
    if isinstance(error, DatastoreError):
        fail(str(error))
    elif isinstance(error, OSError) and error.strerror:
        fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    else:
        fail(f"unexpected {type(error).__name__}; DATASTORE_DEBUG=1 shows where, please report it")
    return exit_code_for(error)
