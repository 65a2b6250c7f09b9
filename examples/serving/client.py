"""Asks a server of digits again and again: `python client.py ADDRESS SECONDS [EVERY]`; one JSON line each second.

Each of four workers keeps one connection for a while and then opens another, as clients do. A line has the requests so
far, the failures, and how many answers each version gave. We try nothing twice; gRPC itself sends a request again which
no server has begun, as it does for every client.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).parent))
messages, services = grpc.protos_and_services("digits.proto")
WORKERS = 4
DEADLINE_S = 60.0
ZERO = (
    *(0, 0, 5, 13, 9, 1, 0, 0),
    *(0, 0, 13, 15, 10, 15, 5, 0),
    *(0, 3, 15, 2, 0, 11, 8, 0),
    *(0, 4, 12, 0, 0, 8, 8, 0),
    *(0, 5, 8, 0, 0, 9, 8, 0),
    *(0, 4, 11, 0, 1, 12, 7, 0),
    *(0, 2, 14, 5, 10, 12, 0, 0),
    *(0, 0, 6, 13, 10, 0, 0, 0),
)
"""The first image of scikit-learn's digits: a 0."""


class Counts:
    """What came back. Threads: any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.answers: Counter[str] = Counter()
        self.digits: Counter[int] = Counter()
        self.failures: list[str] = []

    def line(self) -> str:
        """All of it, for a program."""
        with self.lock:
            return json.dumps(
                {
                    "answers": sum(self.answers.values()),
                    "versions": dict(self.answers),
                    "digits": {str(digit): count for digit, count in self.digits.items()},
                    "failed": len(self.failures),
                    "failures": self.failures[:3],
                }
            )


def ask(address: str, until: float, counts: Counts, requests_per_connection: int) -> None:
    """Ask until then."""
    while time.monotonic() < until:
        with grpc.insecure_channel(address) as channel:
            stub = services.DigitsStub(channel)
            for _ in range(requests_per_connection):
                if time.monotonic() >= until:
                    return
                try:
                    found = stub.Predict(messages.Image(pixels=ZERO), timeout=DEADLINE_S)
                except grpc.RpcError as error:
                    with counts.lock:
                        counts.failures.append(f"{error.code()}: {error.details()}")
                else:
                    with counts.lock:
                        counts.answers[found.version] += 1
                        counts.digits[found.digit] += 1
                time.sleep(0.02)


def main() -> None:
    """Ask from four threads."""
    address, seconds = sys.argv[1], float(sys.argv[2])
    counts, until = Counts(), time.monotonic() + seconds
    # Two of them open many connections, two keep theirs for the whole time.
    lengths = (10, 10, 1_000_000, 1_000_000)
    workers = [threading.Thread(target=ask, args=(address, until, counts, length)) for length in lengths]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers):
        time.sleep(1.0)
        print(counts.line(), flush=True)
    sys.exit(1 if counts.failures else 0)


if __name__ == "__main__":
    main()
