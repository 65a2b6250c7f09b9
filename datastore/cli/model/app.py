"""The verbs of `datastore model`."""

from __future__ import annotations

import typer

from datastore.cli.model import delete, diff, export, gc, import_, list_, mount, save, show, tag, verify
from datastore.cli.umount import umount_command

HELP = """Models: directories saved as versions that never change.

The versions are in a Datastore of the file that -f names: NAME/7/ holds the files of version 7 as they were, and
NAME/7.json is its manifest.
"""

app = typer.Typer(name="model", help=HELP, no_args_is_help=True)
app.command("save")(save.save_command)
app.command("list")(list_.list_command)
app.command("show")(show.show_command)
app.command("diff")(diff.diff_command)
app.command("tag")(tag.tag_command)
app.command("verify")(verify.verify_command)
app.command("export")(export.export_command)
app.command("import")(import_.import_command)
app.command("mount")(mount.mount_command)
app.command("umount")(umount_command)
app.command("delete")(delete.delete_command)
app.command("gc")(gc.gc_command)
