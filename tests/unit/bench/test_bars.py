"""Bars are judged from figures alone."""

from __future__ import annotations

import pytest

from bench.bars import BARS, LOCAL, NATIVE, OURS, SHORT_ALLOWANCE, Against, Bar, judge, last_line
from bench.metrics import BY_ID, WORKLOADS, Figure, Results


def results(metric: str, **figures: float | Figure) -> Results:
    made = Results()
    for subject, value in figures.items():
        made.add(subject.replace("_", "-"), metric, value if isinstance(value, Figure) else Figure(float(value)))
    return made


def only(bar: Bar, measured: Results, allowance: float = 1.0) -> tuple[str, str]:
    [verdict] = judge([bar], measured, allowance)
    return verdict.word, verdict.who


PEER = Bar("W1.read", ">=", 1.3, Against.PEER)
FASTER_WALK = Bar("W8.flat_cold", "<=", 1.5, Against.NATIVE)


def test_every_bar_names_a_metric_and_every_workload_has_a_bar() -> None:
    assert {bar.metric for bar in BARS} <= BY_ID.keys()
    assert {BY_ID[bar.metric].workload for bar in BARS} == set(WORKLOADS)


def test_a_bar_asks_for_the_direction_in_which_its_metric_is_better() -> None:
    assert all((bar.direction == ">=") == (BY_ID[bar.metric].better == "higher") for bar in BARS)


@pytest.mark.parametrize(("ours", "word"), [(130, "met"), (129, "missed")])
def test_the_best_peer_counts_and_it_is_named(ours: float, word: str) -> None:
    assert only(PEER, results("W1.read", ours=ours, native=900, local=900, s3fs=100, rclone_full=50)) == (word, "s3fs")


def test_a_peer_that_failed_is_not_the_best() -> None:
    measured = results("W1.read", ours=130, s3fs=100, rclone_full=Figure(500, error="wrong content"))
    assert only(PEER, measured) == ("met", "s3fs")


def test_without_a_peer_nothing_is_compared() -> None:
    measured = results("W1.read", ours=130, native=100)
    assert only(PEER, measured) == ("not compared", "")
    assert last_line(judge([PEER], measured)) == "0 met, 0 missed"


def test_a_time_has_to_be_at_most_so_many_times_the_reference() -> None:
    assert only(FASTER_WALK, results("W8.flat_cold", ours=1.5, native=1.0)) == ("met", NATIVE)
    assert only(FASTER_WALK, results("W8.flat_cold", ours=1.6, native=1.0)) == ("missed", NATIVE)


def test_half_a_bar_is_half_a_rate_or_twice_a_time() -> None:
    local = Bar("W2.read", ">=", 0.8, Against.LOCAL)
    assert only(local, results("W2.read", ours=40, local=100), SHORT_ALLOWANCE) == ("met", LOCAL)
    assert only(local, results("W2.read", ours=39, local=100), SHORT_ALLOWANCE) == ("missed", LOCAL)
    assert only(FASTER_WALK, results("W8.flat_cold", ours=3.0, native=1.0), SHORT_ALLOWANCE) == ("met", NATIVE)
    assert only(FASTER_WALK, results("W8.flat_cold", ours=3.1, native=1.0), SHORT_ALLOWANCE) == ("missed", NATIVE)


def test_peers_are_compared_by_what_their_close_means() -> None:
    durable = Bar("W7.one", ">=", 1.5, Against.DURABLE_PEER)
    lazy = Bar("W7.one", ">=", 1.0, Against.LAZY_PEER)
    measured = results("W7.one", ours=150, s3fs=100, geesefs=Figure(600, late=True))
    assert only(durable, measured) == ("met", "s3fs")
    assert only(lazy, measured) == ("missed", "geesefs")


def test_a_result_that_was_not_durable_misses_a_bar_among_durable_peers() -> None:
    bar = Bar("W9.mkdir", ">=", 1.0, Against.DURABLE_PEER)
    assert only(bar, results("W9.mkdir", ours=Figure(900, late=True), s3fs=100))[0] == "missed"


def test_a_limit_is_absolute() -> None:
    bar = Bar("W10.walk", "<=", 512, Against.LIMIT)
    assert only(bar, results("W10.walk", ours=512)) == ("met", "limit")
    assert only(bar, results("W10.walk", ours=513)) == ("missed", "limit")
    [verdict] = judge([bar], results("W10.walk", ours=1024))
    assert (verdict.ratio, verdict.reference) == (2.0, 512)


def test_our_own_failure_misses_every_bar() -> None:
    success = Bar("W12.1", "<=", float("inf"), Against.SUCCESS)
    assert only(success, results("W12.1", ours=3.0))[0] == "met"
    assert only(success, results("W12.1", ours=Figure(error="exit code 1")))[0] == "missed"
    assert only(PEER, results("W1.read", s3fs=100))[0] == "missed"


def test_a_metric_that_was_not_measured_is_not_judged() -> None:
    assert {verdict.bar.metric for verdict in judge(BARS, results("W1.read", ours=1))} == {"W1.read"}


def test_the_last_line_counts() -> None:
    measured = results("W1.read", **{OURS: 130.0, "s3fs": 100.0, NATIVE: 1000.0})
    assert last_line(judge(BARS, measured)) == "1 met, 1 missed"


def test_a_short_run_asks_half_of_what_was_reached() -> None:
    """Where a bar is missed anyway, what got much worse is still seen."""
    bar = Bar("W1.read", ">=", 0.5, Against.NATIVE, reached=0.3)
    assert only(bar, results("W1.read", ours=16, native=100), allowance=0.5)[0] == "met"
    assert only(bar, results("W1.read", ours=14, native=100), allowance=0.5)[0] == "missed"
    assert only(bar, results("W1.read", ours=49, native=100))[0] == "missed"
