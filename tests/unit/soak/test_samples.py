"""What counts as growth."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil

from tests.soak.disturb import Event
from tests.soak.load import Log
from tests.soak.report import ROWS, Outcome, markdown
from tests.soak.samples import FILLING, MIB, Sample, descriptors_but, disk_bytes, growth, resting, serving


def series(first: int, last: int, count: int = 100) -> list[Sample]:
    return [
        Sample(
            at_s=float(index),
            server_age_s=100.0,
            rss=(first + (last - first) * index // count) * MIB,
            descriptors=300,
            threads=30,
        )
        for index in range(count)
    ]


def test_flat_is_flat() -> None:
    assert growth(series(100, 100)) == []
    assert growth(series(100, 110)) == []


def test_a_leak_is_named() -> None:
    (line,) = growth(series(100, 300))
    assert line.startswith("rss: ")


def test_servers_that_begin_anew_and_fill_their_caches_are_flat() -> None:
    """However many were killed in which quarter."""
    ages = [at % 10 if 25 <= at < 50 else at for at in range(100)]
    grown = [
        Sample(at_s=float(at), server_age_s=6.0 + age, rss=min(50 + 10 * age, 200) * MIB) for at, age in enumerate(ages)
    ]
    assert growth(grown) == []


def test_a_young_server_is_not_judged() -> None:
    young = [Sample(at_s=float(at), server_age_s=0.1, rss=1 << 40) for at in range(80, 100)]
    assert growth(series(100, 100) + young) == []


def test_a_soak_that_rested_for_long_before_is_judged_from_its_first_sample_on() -> None:
    late = [replace(sample, at_s=sample.at_s + 500.0) for sample in series(100, 100)]
    assert growth(late) == []
    (line,) = growth([replace(sample, threads=30 + 200 * (sample.at_s > 580)) for sample in late])
    assert line.startswith("threads: ")


def test_where_kills_followed_on_each_other_the_halves_are_judged() -> None:
    samples = [replace(each, server_age_s=0.1 if 20 < each.at_s < 60 else 9.0) for each in series(100, 100)]
    assert growth(samples) == []
    (line,) = growth([replace(sample, threads=30 + 200 * (sample.at_s > 50)) for sample in samples])
    assert line.startswith("threads: ")


def test_a_short_soak_ends_while_the_caches_fill() -> None:
    assert growth(series(60, 200), FILLING) == []
    (line,) = growth(series(60, 400), FILLING)
    assert line.startswith("rss: ")
    before, after = Sample(at_s=0, rss=60 * MIB), Sample(at_s=9, rss=200 * MIB)
    assert resting(before, after, 256 * MIB, FILLING) == []
    assert len(resting(before, after, 256 * MIB)) == 1


def test_too_little_is_no_proof() -> None:
    assert growth([]) == ["too few samples to judge growth"]


def test_what_is_left_at_rest_is_named() -> None:
    before = Sample(at_s=0, descriptors=50, threads=20, rss=80 * MIB)
    after = Sample(at_s=9, descriptors=500, threads=20, rss=80 * MIB, pending=2, unsent=1, cache=300 * MIB)
    said = " / ".join(resting(before, after, 256 * MIB))
    assert "descriptors: 50 (at rest first), 500 (at the end)" in said
    assert "2 multipart uploads are left" in said
    assert "1 files are not sent" in said
    assert "the cache takes 300 MiB of 256" in said
    assert resting(before, before, 256 * MIB) == []


def test_disk_bytes_is_what_the_disk_gives(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a").write_bytes(b"x" * 100_000)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
    assert 100_000 <= disk_bytes(tmp_path) < 200_000


def test_the_report_says_whether_it_was_flat() -> None:
    outcome = Outcome(60.0, "here", Log(), series(100, 100), [Event("kill", 3.0), Event("gone", 5.0, 2.5)])
    text = markdown(outcome)
    assert "# Soak: 1.0 minutes, flat" in text
    assert "1 kills of the server, 1 outages of the store (2 s in all)" in text
    assert text.count(" s | 0 |") == ROWS
    outcome.wrong.append("rss: grew")
    assert "NOT FLAT" in markdown(outcome)
    assert "- wrong: rss: grew" in markdown(outcome)


def test_the_one_that_waits_is_not_looked_at() -> None:
    """A supervisor has a second server in waiting, with one thread: its size and descriptors say nothing."""
    busy, waiting = SimpleNamespace(num_threads=lambda: 30), SimpleNamespace(num_threads=lambda: 1)
    for children, found in (([busy, waiting], busy), ([waiting, busy], busy), ([busy], busy), ([waiting], None)):
        supervisor = SimpleNamespace(children=partial(list, children))
        assert serving(cast(psutil.Process, supervisor)) is cast(psutil.Process | None, found)


def test_descriptors_of_the_cache_are_not_counted(tmp_path: Path) -> None:
    """They grow with the cache, up to a limit of their own."""
    cache = tmp_path / "cache"
    cache.mkdir()
    before = descriptors_but(os.getpid(), cache)
    with open(cache / "block", "wb"), open(tmp_path / "other", "wb"):
        assert descriptors_but(os.getpid(), cache) == before + 1
