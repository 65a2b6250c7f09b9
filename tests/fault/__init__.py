"""Faults at every store call. The shared code has assertions, so pytest has to rewrite it before it is imported."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.fault.sweeping")
