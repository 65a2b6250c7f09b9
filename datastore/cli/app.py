"""All verbs, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence

import typer

from datastore.cli import (
    crd,
    doctor,
    list_,
    mount,
    removefinalizer,
    rescue,
    restart,
    run,
    serve,
    status,
    top,
    umount,
    version,
    warm,
)
from datastore.cli.console import fail
from datastore.cli.exitcodes import ExitCode, exit_code_for
from datastore.cli.job.app import app as job_app
from datastore.cli.model import app as model
from datastore.errors import DatastoreError
from datastore.mounting.signals import Interrupted

HELP = """Every kind of data storage as one local directory.

A Datastore is a YAML manifest; the same file works here and with kubectl apply. Exit codes and all options:
docs/reference/cli.md.
"""

app = typer.Typer(
    name="datastore",
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(version.version_option)
app.command("mount")(mount.mount_command)
app.command("umount")(umount.umount_command)
app.command("unmount", hidden=True)(umount.umount_command)
app.command("restart")(restart.restart_command)
app.command("list")(list_.list_command)
app.command("status")(status.status_command)
app.command("top")(top.top_command)
app.command("unsent")(rescue.unsent_command)
app.command("warm")(warm.warm_command)
app.command("run", context_settings={"allow_interspersed_args": False})(run.run_command)
app.command("serve", context_settings={"allow_interspersed_args": True})(serve.serve_command)
app.command("doctor")(doctor.doctor_command)
app.add_typer(model.app)
app.command("remove-finalizer")(removefinalizer.remove_finalizer_command)
app.add_typer(job_app)
app.command("crd")(crd.crd_command)
app.command("version")(version.version_command)


def exit_code_of(run_verb: Callable[[], object], came: Sequence[int] = ()) -> int:
    """Run a verb; whatever it raises becomes one line on standard error. Tracebacks only with DATASTORE_DEBUG=1.

    came: see signals.keyboard().
    """
    try:
        code = run_verb()
        return code if isinstance(code, int) else ExitCode.OK
    except Interrupted as interrupted:
        fail(str(interrupted))
        return interrupted.exit_code
    except (KeyboardInterrupt, typer.Abort):
        fail("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; the interpreter must not try to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.ERROR
    except Exception as error:
        if not came:
            return _failed(error)
        fail("interrupted")  # what a library made of it does not matter
        return ExitCode.INTERRUPTED


def _failed(error: Exception) -> int:
    if os.environ.get("DATASTORE_DEBUG") == "1":
        traceback.print_exc()
    describe = getattr(error, "format_message", None)
    if callable(describe):
        # A usage error of typer: it says itself what is wrong. Without any argument it has shown the help already.
        if text := describe().replace("Value error, ", ""):
            fail(f"{text} (see --help)")
        return ExitCode.USAGE
    if isinstance(error, DatastoreError):
        fail(str(error))
    elif isinstance(error, OSError) and error.strerror:
        fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    else:
        fail(f"unexpected {type(error).__name__}; DATASTORE_DEBUG=1 shows where, please report it")
    return exit_code_for(error)
