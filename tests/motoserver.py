"""moto's server on the given port, with conditional requests that hold among concurrent writers.

moto compares If-Match in one step and writes in another, in a thread for each request, so two writers may both pass.
Here, requests with a condition are served one at a time.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import moto.server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication

CONDITIONS = {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"}


class Conditions(DomainDispatcherApplication):
    """moto's application, with one conditional request at a time."""

    one = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if not CONDITIONS & environ.keys():
            return super().__call__(environ, start_response)
        with self.one:
            return super().__call__(environ, start_response)


if __name__ == "__main__":
    moto.server.DomainDispatcherApplication = Conditions  # type: ignore[attr-defined]
    moto.server.main(["--host", "127.0.0.1", "--port", sys.argv[1]])
