"""Parses Kubernetes Secrets, and reads credentials from them. Values are hidden at once; no error text shows one."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, replace

from datastore.api.datastore import DEFAULT_NAMESPACE
from datastore.api.fields import CERTIFICATE_PATTERN, MAX_CERTIFICATE_BYTES, matches
from datastore.api.source import SSHCredentials, StaticCredentials
from datastore.errors import InvalidManifest
from datastore.secret import Secret

# Our own names come first, then those of other S3 drivers, so that a Secret made for such a driver works here too.
ACCESS_KEY_NAMES = ("AWS_ACCESS_KEY_ID", "accessKeyID", "accessKeyId", "access_key_id", "access_key", "key_id")
SECRET_KEY_NAMES = ("AWS_SECRET_ACCESS_KEY", "secretAccessKey", "secret_access_key", "secret_key", "access_secret")
TOKEN_NAMES = ("AWS_SESSION_TOKEN", "sessionToken", "session_token")
USERNAME_NAMES = ("username",)
PRIVATE_KEY_NAMES = ("ssh-privatekey",)
PASSWORD_NAMES = ("password",)
CERTIFICATE_NAMES = ("ca.crt", "caBundle")
_STORAGE_NAMES = frozenset(
    {
        *ACCESS_KEY_NAMES,
        *SECRET_KEY_NAMES,
        *TOKEN_NAMES,
        *USERNAME_NAMES,
        *PRIVATE_KEY_NAMES,
        *PASSWORD_NAMES,
        *CERTIFICATE_NAMES,
    }
)
MAX_VALUE_BYTES = MAX_CERTIFICATE_BYTES
"""The longest value that is read, such as certificates or a private key; a whole Secret may have 1 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretManifest:
    """A Kubernetes Secret; repr() hides its values."""

    name: str
    namespace: str
    values: Mapping[str, Secret]


def parse_secret(document: Mapping[str, object]) -> SecretManifest:
    """Parse a Secret document. Errors: InvalidManifest, whose text completes "FILE, document N: "."""
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(metadata, Mapping) or not isinstance(name, str) or not name:
        raise InvalidManifest("metadata.name of the Secret is missing")
    namespace = metadata.get("namespace") or DEFAULT_NAMESPACE
    values = {key: _decoded(key, value) for key, value in _entries(document, "data")}
    # stringData wins, as in Kubernetes.
    values |= {key: Secret(value) for key, value in _entries(document, "stringData")}
    return SecretManifest(name=name, namespace=str(namespace), values=values)


def credentials_from(secret: SecretManifest) -> StaticCredentials:
    """Return the AWS keys of a Secret. Errors: InvalidManifest when key id or secret key is missing or empty."""
    return StaticCredentials(
        access_key_id=_needed(secret, ACCESS_KEY_NAMES).reveal(),
        secret_access_key=_needed(secret, SECRET_KEY_NAMES),
        session_token=_find(secret, TOKEN_NAMES),
    )


def ssh_credentials_from(secret: SecretManifest) -> SSHCredentials:
    """Return the SSH login of a Secret (keys of kubernetes.io/ssh-auth and basic-auth). Errors: InvalidManifest."""
    key, password = _find(secret, PRIVATE_KEY_NAMES), _find(secret, PASSWORD_NAMES)
    if key is None and password is None:
        raise InvalidManifest(f"Secret {secret.name} has neither {PRIVATE_KEY_NAMES[0]} nor {PASSWORD_NAMES[0]}")
    # OpenSSH refuses a private key without the newline at its end.
    return SSHCredentials(
        username=_needed(secret, USERNAME_NAMES).reveal(),
        private_key=None if key is None else Secret(key.reveal() + "\n"),
        password=password,
    )


def certificate_from(secret: SecretManifest) -> str:
    """Return the PEM text that the server's certificate is checked against, or '' if there is none. It is public.

    Errors: InvalidManifest when it is no such text.
    """
    for name in CERTIFICATE_NAMES:
        found = _find(secret, (name,))
        if found is not None and matches(CERTIFICATE_PATTERN, found.reveal()):
            return found.reveal() + "\n"
        if found is not None:
            where = f"{name} of Secret {secret.name}"
            raise InvalidManifest(f"{where} must be PEM text that holds -----BEGIN CERTIFICATE-----")
    return ""


def for_storage(secret: SecretManifest) -> SecretManifest:
    """Return the Secret with only the values that a backend reads. Errors: InvalidManifest for one that is too long."""
    values = {name: value for name, value in secret.values.items() if name in _STORAGE_NAMES}
    for name in values:
        _find(secret, (name,))
    return replace(secret, values=values)


def _needed(secret: SecretManifest, names: tuple[str, ...]) -> Secret:
    found = _find(secret, names)
    if found is None:
        raise InvalidManifest(f"Secret {secret.name} has no {names[0]}, or it is empty")
    return found


def _find(secret: SecretManifest, names: tuple[str, ...]) -> Secret | None:
    for name in names:
        if name in secret.values:
            # `echo KEY | base64` leaves a newline at the end of the key; no AWS key holds white space.
            value = secret.values[name].reveal().strip()
            if len(value) > MAX_VALUE_BYTES:
                raise InvalidManifest(f"{name} of Secret {secret.name} is longer than {MAX_VALUE_BYTES} bytes")
            return Secret(value) if value else None
    return None


def _entries(document: Mapping[str, object], field: str) -> list[tuple[str, str]]:
    entries = document.get(field)
    if entries is None:
        return []
    if not isinstance(entries, Mapping):
        raise InvalidManifest(f"{field} of the Secret must be a mapping of names to text")
    for key, value in entries.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidManifest(f"{field}.{key} of the Secret must be text; put it in quotes")
    return list(entries.items())


def _decoded(key: str, value: str) -> Secret:
    try:
        return Secret(base64.b64decode("".join(value.split()), validate=True).decode())
    except (binascii.Error, ValueError):
        # `from None`: the cause would quote the value.
        complaint = "is not base64 of text; plain text goes into stringData"
        raise InvalidManifest(f"data.{key} of the Secret {complaint}") from None
