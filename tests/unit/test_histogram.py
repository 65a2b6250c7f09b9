"""Latencies in buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.histogram import EDGES_S, Histogram, added, quantile_s


@given(st.lists(st.integers(0, 1 << 62), max_size=50))
def test_everything_is_counted_once(times: list[int]) -> None:
    histogram = Histogram()
    for spent_ns in times:
        histogram.add(spent_ns)
    assert sum(histogram.buckets()) == len(times)
    assert len(histogram.buckets()) == len(EDGES_S) + 1
    assert histogram.total_ns == sum(times)


@given(st.integers(1, int(EDGES_S[-1] * 1e9) - 1))
def test_a_time_lies_below_the_edge_of_its_bucket(spent_ns: int) -> None:
    histogram = Histogram()
    histogram.add(spent_ns)
    bucket = histogram.buckets().index(1)
    assert spent_ns / 1e9 <= EDGES_S[bucket]
    assert bucket == 0 or spent_ns / 1e9 >= EDGES_S[bucket - 1]


@given(st.lists(st.integers(5_000, 10**10), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_right_within_a_factor_of_two(times: list[int], share: float) -> None:
    histogram = Histogram()
    for spent_ns in times:
        histogram.add(spent_ns)
    found = quantile_s(histogram.buckets(), share)
    exact = sorted(times)[max(0, -int(-share * len(times) // 1) - 1)] / 1e9
    assert found is not None
    assert exact / 2 <= found <= exact * 2


def test_nothing_counted_has_no_quantile_and_what_took_longer_than_the_last_edge_is_that() -> None:
    histogram = Histogram()
    assert quantile_s(histogram.buckets(), 0.5) is None
    histogram.add(1 << 50)
    assert quantile_s(histogram.buckets(), 0.5) == EDGES_S[-1]


def test_rows_add_up() -> None:
    assert added([1, 2], [3, 4]) == [4, 6]
    with pytest.raises(ValueError, match="zip"):
        added([1], [1, 2])
