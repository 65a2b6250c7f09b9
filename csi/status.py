"""Converts the driver's errors to gRPC status codes: the table, and the wrapper that applies it to every method.

Source: the error tables of the CSI specification. The first class that matches counts, so subclasses come first.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

from datastore import errors
from datastore.logs import fields, redact

from . import errors as own

log = logging.getLogger(__name__)

CODES: tuple[tuple[type[errors.DatastoreError], grpc.StatusCode], ...] = (
    (own.VolumeBusy, grpc.StatusCode.ABORTED),
    (own.VolumeNotFound, grpc.StatusCode.NOT_FOUND),
    (own.VolumeConflict, grpc.StatusCode.ALREADY_EXISTS),
    (own.Refused, grpc.StatusCode.FAILED_PRECONDITION),
    (own.CommandTimeout, grpc.StatusCode.DEADLINE_EXCEEDED),
    (own.NotAnswering, grpc.StatusCode.UNAVAILABLE),
    (own.DaemonOutdated, grpc.StatusCode.FAILED_PRECONDITION),
    (own.Unsent, grpc.StatusCode.UNAVAILABLE),
    (errors.InvalidManifest, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.CredentialsInvalid, grpc.StatusCode.UNAUTHENTICATED),
    (errors.AccessDenied, grpc.StatusCode.PERMISSION_DENIED),
    (errors.EndpointNotAllowed, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.BucketNotFound, grpc.StatusCode.NOT_FOUND),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.OutOfSpace, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unsupported, grpc.StatusCode.UNIMPLEMENTED),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.TransientStoreError, grpc.StatusCode.UNAVAILABLE),
    (errors.StoreError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.DatastoreError, grpc.StatusCode.INTERNAL),
)

Request = TypeVar("Request")
Response = TypeVar("Response")
Method = Callable[[Any, Request], Awaitable[Response]]


def code_of(error: errors.DatastoreError) -> grpc.StatusCode:
    return next(code for kind, code in CODES if isinstance(error, kind))


def answered(
    method: Method[Request, Response],
) -> Callable[[Any, Request, grpc.aio.ServicerContext[Any, Any]], Awaitable[Response]]:
    """Make a gRPC method from `method(self, request)`: it logs one line, and converts an error to a status code.

    Requests are never logged, because they contain secrets.
    """

    @functools.wraps(method)
    async def answer(self: Any, request: Request, context: grpc.aio.ServicerContext[Any, Any]) -> Response:
        began = time.monotonic()
        volume = getattr(request, "volume_id", "")
        try:
            response = await method(self, request)
        except errors.DatastoreError as error:
            code, text = code_of(error), redact(str(error))
            log.warning("refused", extra=fields(method=method.__name__, volume=volume, code=code.name, error=text))
        except Exception as error:  # the outermost level: no request may end the process
            code, text = grpc.StatusCode.INTERNAL, f"a bug in the driver: {type(error).__name__}"
            log.exception("failed", extra=fields(method=method.__name__, volume=volume))
        else:
            took_ms = round((time.monotonic() - began) * 1000)
            log.log(
                logging.INFO if volume else logging.DEBUG,
                "done",
                extra=fields(method=method.__name__, volume=volume, ms=took_ms),
            )
            return response
        await context.abort(code, text)
        raise AssertionError("abort raises")

    return answer
