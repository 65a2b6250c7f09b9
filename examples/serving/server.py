"""A server of digits over gRPC: reads the mounted model, answers health checks, and ends without losing a request.

The model is a directory with `weights.npz`: `weights`, 64 x 10, and `bias`, 10 numbers (train.py makes it). A Serving
says by its environment where it is, and on which port to listen.
"""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import grpc
import numpy
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

sys.path.insert(0, str(Path(__file__).parent))
messages, services = grpc.protos_and_services("digits.proto")
DRAIN_S = 20.0


class Digits(services.DigitsServicer):
    """The model in memory."""

    def __init__(self, directory: Path, version: str) -> None:
        with numpy.load(directory / "weights.npz") as loaded:
            self._weights, self._bias = loaded["weights"], loaded["bias"]
        self._version = version

    def Predict(self, request, context):  # noqa: N802  (the protocol's name)
        """The digit of an image."""
        if len(request.pixels) != len(self._weights):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"an image has {len(self._weights)} pixels")
        scores = numpy.asarray(request.pixels) @ self._weights + self._bias
        return messages.Digit(digit=int(scores.argmax()), version=self._version)


def main() -> None:
    """Serve until SIGTERM, and then finish what is asked."""
    ending = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    digits = Digits(Path(os.environ["DATASTORE_MODEL_PATH"]), os.environ.get("DATASTORE_MODEL_VERSION", ""))
    # A connection is asked to end in order after 2 s, and the client opens another one. So none is left when SIGTERM
    # comes, 15 s after new ones go to other pods: a request that reaches a gRPC server at the moment of its end is
    # lost.
    server = grpc.server(ThreadPoolExecutor(max_workers=8), options=[("grpc.max_connection_age_ms", 2000)])
    services.add_DigitsServicer_to_server(digits, server)
    ready = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(ready, server)
    server.add_insecure_port(f"[::]:{os.environ.get('DATASTORE_PORT', '8500')}")
    server.start()
    ready.set("", health_pb2.HealthCheckResponse.SERVING)
    ending.wait()
    ready.enter_graceful_shutdown()
    server.stop(DRAIN_S).wait()


if __name__ == "__main__":
    main()
