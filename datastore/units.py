"""Parses and prints Kubernetes quantities, durations, and sizes for people. Pure; every refusal is a ValueError.

Quantities follow k8s.io/apimachinery/pkg/api/resource (suffixes n u m k M G T P E, Ki Mi Gi Ti Pi Ei, or an exponent);
durations follow Go's time.ParseDuration without a sign. The texts of the errors complete "FIELD ...", so they start
with a verb.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_BYTES = (1 << 63) - 1
"""The largest quantity: Kubernetes holds it as an int64."""

QUANTITY_PATTERN = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$"
"""A regular expression for RE2 and Python; the CRD uses it too."""

DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?|([0-9]+(\.[0-9]+)?(ns|us|ms|s|m|h))+)$"
"""A regular expression for RE2 and Python; a number without a unit is in seconds."""

MAX_UMASK = 0o777
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_QUANTITY = re.compile(QUANTITY_PATTERN.removesuffix("$") + r"\Z")
_DURATION = re.compile(DURATION_PATTERN.removesuffix("$") + r"\Z")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|ms|s|m|h)")
_SECONDS = {
    "ns": Fraction(1, 10**9),
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
}
_MAX_TEXT = 64
"""The longest text that is parsed: no useful number is longer, and Fraction is slow on huge numbers."""


def parse_quantity(value: str | int) -> int:
    """Return a Kubernetes quantity as whole bytes; fractions are rounded up, as Kubernetes does."""
    if isinstance(value, bool):
        raise ValueError("must be a quantity such as 10Gi")
    exact = exact_quantity(value)
    size_bytes = -((-exact.numerator) // exact.denominator)
    if abs(size_bytes) > MAX_BYTES:
        raise ValueError("must be less than 8Ei")
    return size_bytes


def exact_quantity(value: str | int) -> Fraction:
    """Return a Kubernetes quantity without rounding: '500m' (of a processor) is a half."""
    return Fraction(value) if isinstance(value, int) else _quantity_text(value)


def _quantity_text(text: str) -> Fraction:
    found = _QUANTITY.match(text) if len(text) <= _MAX_TEXT else None
    if found is None:
        raise ValueError(f"must be a quantity such as 500M, 10Gi or a whole number of bytes, not {_shown(text)}")
    suffix = found[3] or ""
    number = Fraction(text.removesuffix(suffix) if suffix else text)
    if suffix in _BINARY:
        return number * (1 << _BINARY[suffix])
    exponent = _DECIMAL[suffix] if suffix in _DECIMAL else int(suffix[1:])
    return number * Fraction(10) ** exponent


def parse_umask(text: str) -> int:
    """Return a umask, the permissions that are taken away, from octal text as for mount(8) and umask(1): '022'."""
    if not re.fullmatch("[0-7]{1,4}", text) or int(text, 8) > MAX_UMASK:
        raise ValueError(f"must be octal, as 022, not {_shown(text)}")
    return int(text, 8)


def format_quantity(size_bytes: int) -> str:
    """Return the shortest exact Kubernetes quantity: 10737418240 -> '10Gi', 1000 -> '1k', 1001 -> '1001'."""
    if size_bytes == 0:
        return "0"
    for suffix, power in reversed(_BINARY.items()):
        if size_bytes % (1 << power) == 0:
            return f"{size_bytes >> power}{suffix}"
    for suffix in "EPTGMk":
        if size_bytes % 10 ** _DECIMAL[suffix] == 0:
            return f"{size_bytes // 10 ** _DECIMAL[suffix]}{suffix}"
    return str(size_bytes)


def format_size(size_bytes: int) -> str:
    """Return a size for people, with about three significant digits: '0 B', '1.5 KiB', '512 MiB'."""
    size = float(abs(size_bytes))
    sign = "-" if size_bytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        # 1023.95 would be printed as "1024.0", so it belongs to the next unit.
        if size < 1023.95:
            digits = 0 if unit == "B" or size >= 100 or size == int(size) else 1
            return f"{sign}{size:.{digits}f}".removesuffix(".0") + f" {unit}"
        size /= 1024
    return f"{sign}{size:.0f} EiB"


def format_count(number: int, what: str) -> str:
    """Return a number of things for people: '1 file', '2,000 files'."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def parse_duration(value: str | int | float) -> float:
    """Return the seconds in '250ms', '1h30m', '60' or a number; never negative."""
    if isinstance(value, bool):
        raise ValueError("must be a duration such as 1s")
    if isinstance(value, str):
        return float(_duration_text(value))
    if not 0 <= value < float("inf"):
        raise ValueError("must be zero or more seconds")
    return float(value)


def _duration_text(text: str) -> Fraction:
    if len(text) > _MAX_TEXT or not _DURATION.match(text):
        raise ValueError(f"must be a duration such as 250ms, 1s, 5m or 1h30m, not {_shown(text)}")
    if text[-1].isdigit():
        return Fraction(text)
    return sum((Fraction(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text)), Fraction(0))


def format_duration(seconds: float) -> str:
    """Return a duration that parse_duration reads, exact to the millisecond: 5400 -> '1h30m', 0.25 -> '250ms'."""
    milliseconds = round(seconds * 1000)
    text = ""
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, milliseconds = divmod(milliseconds, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def format_roughly(seconds: float) -> str:
    """Return an approximate duration for people: '40 seconds', '7 minutes', '3 hours', '2 days'."""
    for unit, size, until in (("second", 1, 120), ("minute", 60, 7200), ("hour", 3600, 48 * 3600)):
        if abs(seconds) < until:
            return format_count(round(abs(seconds) / size), unit)
    return format_count(round(abs(seconds) / 86400), "day")


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "...")
