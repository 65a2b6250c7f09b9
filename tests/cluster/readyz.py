"""Asks the API server directly, with the administrator's certificate: cheap enough to ask every few milliseconds."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any

REQUEST_TIMEOUT_S = 30.0


def ask(pki: Path, port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a GET. Errors: OSError and http.client.HTTPException while nobody listens."""
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    context.load_cert_chain(str(pki / "admin.crt"), str(pki / "admin.key"))
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def ready(pki: Path, port: int) -> bool:
    """Whether the API server serves."""
    try:
        return ask(pki, port, "/readyz")[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def fetch(pki: Path, port: int, path: str) -> dict[str, Any] | None:
    """The object or list at the path, or None while there is none."""
    try:
        status, body = ask(pki, port, path)
    except (OSError, http.client.HTTPException):
        return None
    found: dict[str, Any] | None = json.loads(body) if status == 200 else None
    return found
