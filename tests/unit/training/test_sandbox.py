"""datastore.training.local.sandbox: how a path comes to be in a replica's view (S-327). The machine is made up."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from datastore.errors import DatastoreError
from datastore.training.local.isolation import Namespaces, Run
from datastore.training.local.sandbox import Entry, Machine, Plan, Shown, planned, to_source
from tests.promises import promise

DATA = Shown(source="/state/mounts/data")


class Made(Machine):
    """A simulated machine: its directories with their entries, and those that this user may write."""

    def __init__(self, directories: dict[str, list[str]], writable: set[str]) -> None:
        self._directories = directories
        self._writable = writable

    def is_dir(self, path: str) -> bool:
        return path in self._directories

    def writable(self, path: str) -> bool:
        return path in self._writable

    def entries(self, path: str) -> list[Entry]:
        return [Entry(name=name.partition("@")[0], link=name.partition("@")[2]) for name in self._directories[path]]


PLAIN = Made({"/": ["bin@usr/bin", "home", "mnt", "proc"], "/mnt": ["disk"], "/home": [], "/home/me": []}, {"/home/me"})


@promise("S-327")
def test_a_directory_that_is_there_is_covered() -> None:
    plan = planned({"/home/me": DATA}, PLAIN)
    assert plan.arguments == (
        *("--dev-bind", "/", "/", "--proc", "/proc"),
        *("--dev-bind", "/state/mounts/data", "/home/me"),
    )
    assert plan.made == ()


@promise("S-327")
def test_a_path_directly_below_the_root_needs_a_separate_root() -> None:
    """Nothing is created on the machine, links stay links, and files that would be lost can't be written."""
    plan = planned({"/data": Shown(source="/s", read_only=True)}, PLAIN)
    assert plan.arguments == (
        *("--tmpfs", "/", "--symlink", "usr/bin", "/bin", "--dev-bind-try", "/home", "/home"),
        *("--dev-bind-try", "/mnt", "/mnt", "--proc", "/proc"),
        *("--ro-bind", "/s", "/data", "--remount-ro", "/"),
    )


@promise("S-327")
def test_a_writable_parent_gets_the_directory_and_any_other_is_copied() -> None:
    plan = planned({"/home/me/out": DATA, "/mnt/data": DATA}, PLAIN)
    assert plan.made == ("/home/me/out",)
    assert plan.arguments[:8] == (
        *("--dev-bind", "/", "/", "--tmpfs", "/mnt"),
        *("--dev-bind-try", "/mnt/disk", "/mnt/disk"),
    )
    assert plan.arguments[-2:] == ("--remount-ro", "/mnt")


@promise("S-327")
def test_a_path_below_another_of_the_job_needs_nothing_of_the_machine() -> None:
    plan = planned({"/home/me/a/b": DATA, "/home/me/a": DATA}, PLAIN)
    assert plan.made == ("/home/me/a",)
    assert plan.arguments.index("/home/me/a") < plan.arguments.index("/home/me/a/b")


@promise("S-327")
def test_a_crowded_directory_is_not_copied() -> None:
    crowded = Made({"/": [], "/mnt": [str(number) for number in range(300)]}, set())
    with pytest.raises(DatastoreError, match="/mnt/data: this directory is not there, and can't be shown in /mnt"):
        planned({"/mnt/data": DATA}, crowded)


@promise("S-327")
def test_a_path_below_a_file_or_in_a_closed_directory_is_refused() -> None:
    class Closed(Made):
        def entries(self, path: str) -> list[Entry]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    with pytest.raises(DatastoreError, match="/etc/passwd/x: can't be shown: /etc/passwd is no directory of this"):
        planned({"/etc/passwd/x": DATA}, Made({"/": ["etc"], "/etc": ["passwd"]}, set()))
    with pytest.raises(DatastoreError, match="/root/x: can't be shown: /root: Permission denied; choose another path"):
        planned({"/root/x": DATA}, Closed({"/": ["root"], "/root": []}, set()))


def test_a_path_of_the_job_is_found_on_the_machine() -> None:
    shown = {"/data": Shown(source="/a"), "/data/deep": Shown(source="/b")}
    assert [to_source(path, shown) for path in ("/data/x", "/data/deep/y", "/database", "/bin/sh")] == [
        "/a/x",
        "/b/y",
        "/database",
        "/bin/sh",
    ]


def test_a_link_leads_to_where_the_replica_finds_its_target(tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "runs/7").mkdir(parents=True)
    program = store / "runs/7/go"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (store / "latest").symlink_to("/data/runs/7")
    (store / "newest").symlink_to("runs/../latest")
    (store / "round").symlink_to("/data/round")
    namespaces = Namespaces(
        plan=Plan(arguments=()), shown={"/data": Shown(source=str(store))}, working_dir="/data", inherited={}
    )
    for word, path in (("/data/newest/go", ""), ("newest/go", ""), ("go", "latest")):
        namespaces.check(Run(unique="a", job="a", command=[word], variables={"PATH": path}))
    for word in ("/data/round/go", "/data/latest/missing"):
        with pytest.raises(DatastoreError, match=f"{word}: no such command"):
            namespaces.check(Run(unique="a", job="a", command=[word], variables={}))
