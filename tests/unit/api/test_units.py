"""datastore.units: quantities, durations, sizes."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastore.units import (
    MAX_BYTES,
    format_duration,
    format_quantity,
    format_roughly,
    format_size,
    parse_duration,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10Gi", 10 << 30),
        ("500M", 500_000_000),
        ("1.5G", 1_500_000_000),
        ("1.5Gi", 3 << 29),
        (".5k", 500),
        ("1.", 1),
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1E", 10**18),
        ("100m", 1),
        ("1n", 1),
        ("-1k", -1000),
        ("+1k", 1000),
        ("12e-1", 2),
    ],
)
def test_a_quantity_is_read_as_kubernetes_reads_it(text: str | int, size: int) -> None:
    assert parse_quantity(text) == size


@pytest.mark.parametrize(
    "text", ["", "10GB", "10 Gi", "Gi", "1,5G", "0x10", "1e", "1e999", "ten", "1Gi\n", "9" * 65, True, "16Ei", 1 << 63]
)
def test_a_text_that_is_no_quantity_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"^must be "):
        parse_quantity(text)


@given(st.integers(-MAX_BYTES, MAX_BYTES))
def test_a_printed_quantity_reads_back_exactly(size: int) -> None:
    assert parse_quantity(format_quantity(size)) == size


@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from(["Ki", "Mi", "k", "M"]))
def test_larger_numbers_are_larger_quantities(number: int, step: int, suffix: str) -> None:
    assert parse_quantity(f"{number + step}{suffix}") > parse_quantity(f"{number}{suffix}")


@given(st.text(max_size=20))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    try:
        assert isinstance(parse_quantity(text), int)
    except ValueError as error:
        told = str(error)
        assert told.startswith("must be ")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1),
        ("250ms", 0.25),
        ("5m", 300),
        ("1h30m", 5400),
        ("60", 60),
        ("0.5", 0.5),
        (2, 2),
        (0.25, 0.25),
        ("1.5h", 5400),
        ("10us", 1e-5),
        ("7ns", 7e-9),
        (0, 0),
    ],
)
def test_a_duration_is_seconds(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "1d", "s", "-1s", "1 s", "1h30", "1s\n", -1, float("nan"), float("inf"), True, "1" * 65 + "s"]
)
def test_a_text_that_is_no_duration_is_refused(text: str | float) -> None:
    with pytest.raises(ValueError, match=r"^must be "):
        parse_duration(text)


@given(st.integers(0, 10**10))
def test_a_printed_duration_reads_back_to_the_millisecond(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == float(Fraction(milliseconds, 1000))


@given(st.text(max_size=20))
def test_any_text_is_a_duration_or_a_value_error(text: str) -> None:
    try:
        assert parse_duration(text) >= 0
    except ValueError as error:
        told = str(error)
        assert told.startswith("must be ")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (512 << 20, "512 MiB"),
        (10 << 30, "10 GiB"),
        ((1 << 20) - 1, "1 MiB"),
        (-2048, "-2 KiB"),
        (1 << 60, "1 EiB"),
        (123456789, "118 MiB"),
    ],
)
def test_sizes_are_printed_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, MAX_BYTES))
def test_a_printed_size_is_short(size: int) -> None:
    assert len(format_size(size)) <= 8


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 seconds"), (-1, "1 second"), (119, "119 seconds"), (430, "7 minutes"), (7200, "2 hours"), (3e5, "3 days")],
)
def test_a_rough_duration_is_words(seconds: float, words: str) -> None:
    assert format_roughly(seconds) == words
