"""The errors that keep an object from being Ready, each with its reason for programs. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from datastore.api.explain import explain
from datastore.api.reasons import REASONS
from datastore.errors import DatastoreError
from datastore.logs import redact

ABOUT_CREDENTIALS = frozenset({"CredentialsInvalid", "SecretNotFound", "SecretInvalid", "CredentialsMissing"})
"""Reasons with which CredentialsValid is False. With PAST_CREDENTIALS it is True, with others True only if it was."""
PAST_CREDENTIALS = frozenset({"BucketNotFound", "AccessDenied", "OutOfSpace"})
"""Reasons that a server gives only to keys that it knows."""
MESSAGE_MAX = 1024
"""The most bytes of a message: an Event takes 1,024, so longer server messages are cut."""
_REQUEST = re.compile(r" \(request [^()]*\)")
"""A request's id. It differs each time, and would make a new status of the same fault."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")
Parsed = TypeVar("Parsed", bound=BaseModel)


class Mistake(DatastoreError):
    """An error that user or administrator has to correct. permanent: only a change of a watched object helps."""

    def __init__(self, reason: str, message: str, *, permanent: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.permanent = permanent


def parsed(body: Mapping[str, Any], model: type[Parsed]) -> Parsed:
    """Return the validated object, without what the API server adds. Errors: Mistake when it is invalid."""
    names = {name: body["metadata"][name] for name in ("name", "namespace") if name in body["metadata"]}
    document = {name: body.get(name) for name in ("apiVersion", "kind", "spec")} | {"metadata": names}
    try:
        return model.model_validate(document)
    except ValidationError as error:
        # Not `from error`: pydantic's text contains the input.
        raise Mistake("InvalidSpec", explain(error, model), permanent=True) from None


def reason_of(error: DatastoreError) -> str:
    """Return the error's reason, one CamelCase word."""
    if isinstance(error, Mistake):
        return error.reason
    return next(REASONS[kind] for kind in type(error).__mro__ if kind in REASONS)


def message_of(error: BaseException) -> str:
    """Return one line for people, with the server's words, without secrets, of at most MESSAGE_MAX bytes."""
    text = _CONTROL.sub(" ", _REQUEST.sub("", redact(str(error)))).strip()
    raw = text.encode("utf-8", "replace")
    return text if len(raw) <= MESSAGE_MAX else raw[: MESSAGE_MAX - 3].decode("utf-8", "ignore") + "..."
