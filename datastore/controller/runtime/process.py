"""What the processes of all controllers share: command line options, and running until a signal."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from datastore import logs
from datastore.controller.runtime.client import Client, Fence
from datastore.controller.runtime.operator import Kind, KindMissing, Operator
from datastore.controller.runtime.settings import RuntimeSettings
from datastore.logs import fields

M_ARENA_MAX = -8
log = logging.getLogger(__name__)


def arguments(module: str, what: str, defaults: RuntimeSettings) -> argparse.ArgumentParser:
    """Return a parser of `python -m MODULE` with the options of every controller. what: the objects, in the plural."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"The controller of {what}.")
    add = parser.add_argument
    add(
        "--namespace",
        action="append",
        default=[],
        dest="namespaces",
        help="serve only this one and its own; repeatable (also: NAMESPACES=a,b)",
    )
    add("--workers", type=int, default=defaults.workers, help=f"{what} reconciled at once")
    add("--port", type=int, default=defaults.port, help="of /livez, /readyz and /metrics")
    add("--verbose", action="store_true", help="log every step")
    return parser


def runtime_settings(given: argparse.Namespace, defaults: RuntimeSettings) -> dict[str, Any]:
    """Return the fields of RuntimeSettings, from the command line and the environment."""
    return {
        "namespaces": tuple(given.namespaces) or tuple(os.environ.get("NAMESPACES", "").replace(",", " ").split()),
        "namespace": os.environ.get("POD_NAMESPACE") or defaults.namespace,
        "identity": os.environ.get("POD_NAME") or f"{defaults.identity}-{os.getpid()}",
        "workers": given.workers,
        "port": given.port,
    }


def run(settings: RuntimeSettings, name: str, kind: Callable[[Client, Fence], Kind], *, verbose: bool) -> NoReturn:
    """Run until SIGTERM or SIGINT, and end the process. name: the name of the Lease."""
    logs.setup(logging.DEBUG if verbose else logging.INFO)
    # kopf logs every event of every object at INFO and DEBUG.
    logging.getLogger("kopf").setLevel(logging.WARNING)
    # These log the error, with its traceback, that they then raise, and that is logged below.
    for module in ("orchestration", "running"):
        logging.getLogger(f"kopf._core.reactor.{module}").setLevel(logging.CRITICAL)
    _few_arenas()
    code = 1
    try:
        asyncio.run(_run(settings, name, kind))
        code = 0
    except KindMissing as error:
        log.error("the controller can't continue", extra=fields(error=error))
    except Exception:
        log.exception("the controller can't continue")
    # Threads may still wait for a storage server, and a normal exit would wait for the threads.
    logging.shutdown()
    os._exit(code)


def _few_arenas() -> None:
    """Have threads share two arenas (mallopt(3)): with one each, a thousand Datastores took 185 instead of 119 MiB."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


async def _run(settings: RuntimeSettings, name: str, kind: Callable[[Client, Fence], Kind]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await Operator(settings, name, kind).run(stop)
