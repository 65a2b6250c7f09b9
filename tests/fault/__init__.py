"""Faults at every store call; the shared code asserts, so pytest has to rewrite it before it is imported."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.fault.sweeping")
