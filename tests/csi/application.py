"""What a pod runs while parts of ours are replaced: writes, reads back by checksum, lists, for ever.

    python tests/csi/application.py DIRECTORY

A process of its own: the one that starts our processes must have no file of the mount open, because each child that it
forks closes its copies first, and that asks the very mount which the child is to serve.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

FILES = 16


def main(directory: Path) -> None:
    """Each round prints its number."""
    sums: dict[int, str] = {}
    number = 0
    while True:
        body = os.urandom(50_000)
        sums[number % FILES] = hashlib.sha256(body).hexdigest()
        with (directory / f"f{number % FILES}").open("wb") as file:
            file.write(body[:30_000])
            file.flush()
            file.write(body[30_000:])
        for each, checksum in sums.items():
            read = (directory / f"f{each}").read_bytes()
            assert hashlib.sha256(read).hexdigest() == checksum, f"f{each} has other bytes"
        assert len(os.listdir(directory)) == len(sums)
        number += 1
        print(number, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
