"""A killed command that hangs in the kernel, because its request was read and is not answered."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from datastore.csi.commands import Commands
from datastore.csi.errors import CommandTimeout
from datastore.fuse.kernel import device
from tests.patience import eventually
from tests.promises import promise

pytestmark = [pytest.mark.fuse, pytest.mark.root_only]
INIT, INTERRUPT = 26, 36
HELD_S = 120.0
"""So long is a request that was taken held at the most."""


class Silent(NamedTuple):
    """taken: set when a request was read; answers: set to have requests answered."""

    taken: threading.Event
    answers: threading.Event


@contextmanager
def taken_and_not_answered(mountpoint: Path) -> Iterator[Silent]:
    """A mount whose server takes requests and answers none, not even that it heard of an interrupt, until the event.

    The kernel lets nobody go whose request has been taken (fs/fuse/dev.c, request_wait_answer).
    """
    mountpoint.mkdir()
    fd = device.mount(str(mountpoint), "silent")
    taken, answers = threading.Event(), threading.Event()
    waiting: list[int] = []

    def serve() -> None:
        while True:
            try:
                request = os.read(fd, 1 << 20)
            except OSError:  # unmounted
                return
            _, opcode, unique = struct.unpack_from("<IIQ", request)
            if opcode == INIT:
                settled = struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 0, 16, 12, 1 << 17, 1, 0, 0, 0)
                os.write(fd, struct.pack("<IiQ", 16 + len(settled), 0, unique) + settled)
            elif opcode != INTERRUPT:
                waiting.append(unique)
                taken.set()
                if answers.is_set():
                    answer()

    def answer() -> None:
        while waiting:
            os.write(fd, struct.pack("<IiQ", 16, -errno.EIO, waiting.pop()))

    serving = threading.Thread(target=serve)
    serving.start()

    def tell() -> None:
        answers.wait(HELD_S)
        answer()

    telling = threading.Thread(target=tell)
    telling.start()
    try:
        yield Silent(taken, answers)
    finally:
        answers.set()
        telling.join()
        device.unmount(str(mountpoint), lazy=True)
        serving.join()
        os.close(fd)


@promise("S-234")
def test_a_stuck_command_is_left_counted_and_blocks_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, place = Commands(), str(tmp_path / "m")
    with taken_and_not_answered(Path(place)) as silent:

        class Begun(subprocess.Popen[bytes]):
            """Its time counts from when the kernel has its request."""

            def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
                eventually(silent.taken.is_set, "the request is taken")
                return super().communicate(input, timeout)

        monkeypatch.setattr(subprocess, "Popen", Begun)
        began = time.monotonic()
        with pytest.raises(CommandTimeout, match="took longer than 1 s"):
            commands.run(["stat", "-f", "--", place], place=place, timeout_s=1.0)
        assert (commands.left_behind(), commands.left_behind(place), commands.left_behind("/other")) == (1, 1, 0)
        with pytest.raises(CommandTimeout, match="an earlier command still hangs there"):
            commands.run(["true"], place=place)
        assert time.monotonic() - began < HELD_S / 2
        assert commands.run(["echo", "fine"], place="/other") == b"fine\n"
        commands.unmount_all("/nothing/is/mounted/here")
        silent.answers.set()
        eventually(lambda: commands.left_behind() == 0, "it ends when it may")
        assert commands.run(["true"], place=place) == b""
