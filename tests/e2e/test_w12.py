"""W12: real programs on our mount, with a second mount of the same bucket beside it. Each part checks what it did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bench.w12 import PARTS, Subject, ours
from bench.w12_inputs import Inputs, make_inputs
from tests.servers import Server

pytestmark = [pytest.mark.fuse, pytest.mark.e2e_laptop, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def subject(versitygw: Server) -> Iterator[Subject]:
    # A short path: there is a Unix socket below it.
    with (
        TemporaryDirectory(prefix="w12-", ignore_cleanup_errors=True) as folder,
        ours(versitygw, Path(folder)) as mounts,
    ):
        yield mounts


@pytest.mark.parametrize("part", PARTS)
def test_a_real_program_succeeds_on_the_mount(part: str, subject: Subject, inputs: Inputs) -> None:
    assert PARTS[part](subject, inputs) > 0
