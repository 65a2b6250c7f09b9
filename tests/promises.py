"""The mark that says which promises of docs/SEMANTICS.md a test checks."""

from __future__ import annotations

import pytest


def promise(*ids: str) -> pytest.MarkDecorator:
    """`@promise("S-52")`: this test fails when that promise is broken."""
    return pytest.mark.promise(*ids)
