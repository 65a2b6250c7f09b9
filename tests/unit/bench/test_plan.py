"""Which cells a run has, and what its command line means."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from bench.__main__ import (
    GROUPS,
    SHORT_WORKLOADS,
    arguments,
    choose_peers,
    choose_workloads,
    open_subjects,
    plan,
)
from bench.metrics import METRICS, WORKLOADS
from bench.peers import PEERS, Place
from bench.subjects import PeerMount, own_subjects, trusting
from tests.servers import Server

SERVER = Server(name="versitygw", endpoint="http://127.0.0.1:9", access_key="key", secret_key="secret")


def cells(tmp_path: Path, wanted: tuple[str, ...], runs: int = 2) -> list[tuple[int, str, str]]:
    subjects = [*own_subjects(SERVER, tmp_path), *(PeerMount(peer, SERVER, tmp_path) for peer in PEERS)]
    return [(run, group.workloads[0], subject.name) for run, group, subject in plan(subjects, wanted, runs)]


def test_the_groups_give_every_metric_but_what_all_cells_give_together() -> None:
    assert {each for group in GROUPS for each in group.metrics} == {metric.id for metric in METRICS} - {"W10.any"}


def test_all_contenders_are_measured_side_by_side_and_twice(tmp_path: Path) -> None:
    planned = cells(tmp_path, ("W3",))
    once = ["ours", "native", "local", *(peer.name for peer in PEERS)]
    assert planned == [(run, "W3", name) for run in (0, 1) for name in once]


def test_only_names_workloads() -> None:
    assert choose_workloads("w1, W5", short=False) == ("W1", "W5")
    assert choose_workloads("", short=False) == WORKLOADS
    assert choose_workloads("", short=True) == SHORT_WORKLOADS
    with pytest.raises(argparse.ArgumentTypeError, match="W99"):
        choose_workloads("W1,W99", short=False)


def test_peers_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "s3fs").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose_peers(None) == ["s3fs", "s3fs-cache"]
    assert choose_peers("s3fs-cache") == ["s3fs-cache"]
    with pytest.raises(argparse.ArgumentTypeError, match="rclone-full"):
        choose_peers("rclone-full")


def test_a_wrong_command_line_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments(["--only", "W77"])
    assert "W77" in capsys.readouterr().err


def test_a_contender_without_a_ca_option_is_not_measured_over_tls(tmp_path: Path) -> None:
    over_tls = replace(SERVER, endpoint="https://127.0.0.1:9", ca_file="/ca.crt")
    names = [peer.name for peer in PEERS]
    left = {each.name for each in open_subjects(SERVER, tmp_path, names, short=False)} - {
        each.name for each in open_subjects(over_tls, tmp_path, names, short=False)
    }
    assert left == {"mount-s3", "mount-s3-cache"}
    assert (set(trusting(over_tls).values()), trusting(SERVER)) == ({"/ca.crt"}, {})


@pytest.mark.parametrize("name", ["s3fs-cache", "mount-s3-cache"])
def test_a_cache_is_where_it_is_removed(name: str, tmp_path: Path) -> None:
    [peer] = [peer for peer in PEERS if peer.name == name]
    command = peer.command(Place(SERVER, tmp_path / "mnt", tmp_path / "cache", tmp_path))
    assert any(str(tmp_path / "cache") in str(word) for word in command)


def test_no_key_is_in_what_is_run(tmp_path: Path) -> None:
    place = Place(SERVER, tmp_path / "mnt", tmp_path / "cache", tmp_path)
    for peer in PEERS:
        assert "secret" not in " ".join(str(word) for word in peer.command(place))
