"""The types of the values in a manifest, each with its check, whose errors people read, and its schema for the CRD.

The text of every error completes "FIELD ...". A pattern means the same in RE2 and in Python, since the CRD has it too.
"""

from __future__ import annotations

import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel

from datastore.units import DURATION_PATTERN, QUANTITY_PATTERN, parse_duration, parse_quantity

ENDPOINT_PATTERN = r"^https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?$"
PREFIX_PATTERN = r"^([^/\x00-\x1f\x7f][^\x00-\x1f\x7f]*)?$"
REGION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
BUCKET_PATTERN = DNS_NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*$"
PATH_PATTERN = r"^/[^\x00-\x1f\x7f]*$"
PLAIN_PATH_PATTERN = r"^/[^\x00-\x20\x7f,()\"'`$\\]*$"
"""Excludes all characters that separate options or words somewhere on the way to a server."""
MODEL_PATTERN = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
"""A DNS label: the name of a model is also the name of objects in a cluster."""
ALIAS_PATTERN = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"
"""An alias begins with a letter, so that it is never taken for the number of a version."""
LATEST = "latest"
"""The alias that always means the newest version of a model; a manifest can't set it."""
CERTIFICATE_PATTERN = r"-----BEGIN CERTIFICATE-----"
NFS_OPTION_PATTERN = (
    r"^(hard|soft|softerr|noac|nosharecache|lookupcache=(all|none|positive)|vers=(3|4|4\.[0-2])"
    r"|(timeo|retrans|nconnect|rsize|wsize)=[1-9][0-9]{0,7})$"
)
"""Options that change how the kernel asks an NFS server, but neither which one nor as whom."""
HOST_PATTERN = r"^([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*)$"
KNOWN_HOSTS_PATTERN = r"(ssh-|ecdsa-|sk-)[a-z0-9@.-]+ [A-Za-z0-9+/]"

IPV4 = re.compile(r"[0-9]+(\.[0-9]+){3}\Z")
MAX_METADATA_TTL_S = 86_400.0
MAX_CERTIFICATE_BYTES = 64 << 10
"""The limit of a bundle, some forty certificates: the controller has the bundles of all Datastores in memory."""
MAX_PREFIX_BYTES = 900
"""A key has at most 1,024 bytes; the rest is for the names below the prefix."""


class Part(BaseModel):
    """A part of a manifest: immutable, camelCase in YAML, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, hide_input_in_errors=True)


def matches(pattern: str, text: str) -> bool:
    """Return whether the pattern is found in `text`. A last $ matches only at the very end, not before a newline."""
    return re.search(pattern.removesuffix("$") + (r"\Z" if pattern.endswith("$") else ""), text) is not None


def _bucket(value: str) -> str:
    if "/" in value:
        raise ValueError(f"must be a bucket's name alone, not {value!r}; a prefix is a field of its own")
    if not 3 <= len(value) <= 63:
        raise ValueError(f"must have 3 to 63 characters, not {len(value)}")
    if not matches(BUCKET_PATTERN, value):
        raise ValueError(f"must be lower-case letters, digits, hyphens and single dots, not {value!r}")
    if IPV4.match(value):
        raise ValueError(f"must not look like an IP address ({value})")
    return value


def _prefix(value: str) -> str:
    if value.startswith("/"):
        raise ValueError("must not start with '/': keys don't (write data/, not /data)")
    if not matches(PREFIX_PATTERN, value):
        raise ValueError("must not hold control characters")
    if len(value.encode(errors="surrogateescape")) > MAX_PREFIX_BYTES:
        raise ValueError(f"must have at most {MAX_PREFIX_BYTES} bytes")
    return value if not value or value.endswith("/") else value + "/"


def _endpoint(value: str) -> str:
    # Errors don't show the value: an endpoint with credentials in it must not reach a terminal or a log.
    form = "write https://HOST[:PORT]"
    if not value.startswith(("http://", "https://")):
        raise ValueError(f"must be a URL that starts with https:// or http://: {form}")
    if "@" in value:
        raise ValueError(f"must not hold credentials: {form}, and put the keys in a Secret (credentialsSecret)")
    try:
        parts = urlsplit(value)
        port_valid = parts.port is None or parts.port > 0
    except ValueError:
        parts, port_valid = urlsplit("http://"), False
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ValueError(f"must not hold a path or a query: {form}; the bucket has a field of its own")
    if not port_valid or not matches(ENDPOINT_PATTERN, value):
        raise ValueError(f"must name a host, and a port from 1 to 65535 if any: {form}")
    return value.removesuffix("/")


def _region(value: str) -> str:
    if not matches(REGION_PATTERN, value) or len(value) > 63:
        raise ValueError("must be a region name such as eu-central-1")
    return value


def _dns_name(value: str) -> str:
    if not matches(DNS_NAME_PATTERN, value) or len(value) > 253:
        raise ValueError(f"must be a Kubernetes name (lower-case letters, digits, '-' and '.'), not {value[:64]!r}")
    return value


def _secret_name(value: str) -> str:
    # The error does not show the value: someone may have put the key itself here.
    if not matches(DNS_NAME_PATTERN, value) or len(value) > 253:
        raise ValueError("must be the name of a Secret (lower-case letters, digits, '-' and '.')")
    return value


def _certificate(value: str) -> str:
    if len(value.encode()) > MAX_CERTIFICATE_BYTES:
        raise ValueError(f"must have at most {MAX_CERTIFICATE_BYTES} bytes: only those of the server's authority")
    if not matches(CERTIFICATE_PATTERN, value):
        raise ValueError("must be PEM text that holds -----BEGIN CERTIFICATE-----")
    return value


def _host(value: str) -> str:
    if not matches(HOST_PATTERN, value) or len(value) > 253:
        raise ValueError("must be a host name or an address, without a scheme, a user, a port or a path")
    return value


def _nfs_option(value: str) -> str:
    if not matches(NFS_OPTION_PATTERN, value):
        known = (
            "hard, soft, softerr, noac, nosharecache, lookupcache=, vers=, timeo=, retrans=, nconnect=, rsize=, wsize="
        )
        raise ValueError(f"must be one option of nfs(5): {known}")
    return value


def _known_hosts(value: str) -> str:
    if not matches(KNOWN_HOSTS_PATTERN, value) or len(value) > 16384:
        raise ValueError("must be lines of a known_hosts file: HOST TYPE KEY (ssh-keyscan HOST prints them)")
    return value


def _path(value: str) -> str:
    if not matches(PATH_PATTERN, value):
        raise ValueError("must be an absolute path")
    if ".." in value.split("/"):
        raise ValueError("must not hold '..'")
    return value


def _plain_path(value: str) -> str:
    if not matches(PLAIN_PATH_PATTERN, value):
        raise ValueError("must be an absolute path without blanks, commas, brackets, quotes and backslashes")
    return _path(value)


def _one_line(value: str) -> str:
    if not value.strip() or not value.isprintable():
        raise ValueError("must be one line of text")
    return value


def _quantity(value: object) -> int:
    if not isinstance(value, str | int):
        raise ValueError("must be a quantity such as 500M, 10Gi or a whole number of bytes")
    size_bytes = parse_quantity(value)
    if size_bytes < 1:
        raise ValueError("must be more than 0")
    return size_bytes


def _duration(value: object) -> float:
    if not isinstance(value, str | int):
        # A float is an error too: the API server knows "integer or text" only.
        raise ValueError("must be a duration such as 250ms, 1s, 5m, 1h30m, or whole seconds")
    seconds = parse_duration(value)
    if seconds > MAX_METADATA_TTL_S:
        raise ValueError("must be at most 24h")
    return seconds


def text_schema(pattern: str = "", **more: Any) -> WithJsonSchema:
    """Return the schema of a text, with a pattern and other limits of OpenAPI."""
    return WithJsonSchema({"type": "string", **({"pattern": pattern} if pattern else {}), **more})


def _number_or_text(pattern: str, **more: Any) -> WithJsonSchema:
    kinds = [{"type": "integer"}, {"type": "string"}]
    return WithJsonSchema({"anyOf": kinds, "pattern": pattern, "x-kubernetes-int-or-string": True, **more})


def _rule(rule: str, message: str) -> dict[str, Any]:
    """Return what a schema needs for a limit that no pattern expresses well: a CEL rule of the API server."""
    return {"x-kubernetes-validations": [{"rule": rule, "message": message}]}


def _model_name(value: str) -> str:
    if not matches(MODEL_PATTERN, value):
        raise ValueError(f"must have at most 63 lower-case letters, digits and '-', not {value[:80]!r}")
    return value


def _alias(value: str) -> str:
    if value == LATEST:
        raise ValueError(f"must not be {LATEST!r}, which always means the newest version")
    if not matches(ALIAS_PATTERN, value):
        raise ValueError(f"must have at most 63 lower-case letters, digits and '-', a letter first, not {value[:80]!r}")
    return value


Flag = StrictBool
ModelName = Annotated[str, AfterValidator(_model_name), text_schema(MODEL_PATTERN, maxLength=63)]
Alias = Annotated[
    str,
    AfterValidator(_alias),
    text_schema(
        ALIAS_PATTERN,
        maxLength=63,
        **_rule(f"self != '{LATEST}'", f"{LATEST} always means the newest version"),
    ),
]
Bucket = Annotated[
    str,
    AfterValidator(_bucket),
    text_schema(
        BUCKET_PATTERN,
        minLength=3,
        maxLength=63,
        **_rule(r"!self.matches('^[0-9]+([.][0-9]+){3}$')", "must not look like an IP address"),
    ),
]
Prefix = Annotated[str, AfterValidator(_prefix), text_schema(PREFIX_PATTERN, maxLength=MAX_PREFIX_BYTES)]
Endpoint = Annotated[
    str,
    AfterValidator(_endpoint),
    text_schema(
        ENDPOINT_PATTERN,
        maxLength=300,
        **_rule(
            "!isURL(self) || url(self).getPort() == '' || "
            "(int(url(self).getPort()) >= 1 && int(url(self).getPort()) <= 65535)",
            "must name a port from 1 to 65535, if any",
        ),
    ),
]
Region = Annotated[str, AfterValidator(_region), text_schema(REGION_PATTERN, maxLength=63)]
DnsName = Annotated[str, AfterValidator(_dns_name), text_schema(DNS_NAME_PATTERN, maxLength=253)]
SecretName = Annotated[str, AfterValidator(_secret_name), text_schema(DNS_NAME_PATTERN, maxLength=253)]
Certificate = Annotated[
    str, AfterValidator(_certificate), text_schema(CERTIFICATE_PATTERN, maxLength=MAX_CERTIFICATE_BYTES)
]
NO_WAY_UP = _rule("!('/' + self + '/').contains('/../')", "must not hold '..'")
AbsolutePath = Annotated[str, AfterValidator(_path), text_schema(PATH_PATTERN, maxLength=4095, **NO_WAY_UP)]
PlainPath = Annotated[str, AfterValidator(_plain_path), text_schema(PLAIN_PATH_PATTERN, maxLength=1023, **NO_WAY_UP)]
NFSOption = Annotated[str, AfterValidator(_nfs_option), text_schema(NFS_OPTION_PATTERN, maxLength=32)]
Host = Annotated[str, AfterValidator(_host), text_schema(HOST_PATTERN, maxLength=253)]
Port = Annotated[StrictInt, Field(ge=1, le=65535)]
KnownHosts = Annotated[str, AfterValidator(_known_hosts), text_schema(KNOWN_HOSTS_PATTERN, maxLength=16384)]
Line = Annotated[str, AfterValidator(_one_line), text_schema(minLength=1, maxLength=253)]
SizeBytes = Annotated[
    int,
    BeforeValidator(_quantity),
    _number_or_text(
        QUANTITY_PATTERN.replace("[+-]?", "[+]?", 1),
        maxLength=64,
        # Kubernetes takes what is above an int64, and 8Ei itself, for the largest int64.
        **_rule(
            "quantity(string(self)).isGreaterThan(quantity('0')) && quantity(string(self)).isLessThan(quantity('8Ei'))",
            "must be more than 0, and less than 8Ei",
        ),
    ),
]
Seconds = Annotated[
    float,
    BeforeValidator(_duration),
    _number_or_text(
        DURATION_PATTERN,
        maxLength=64,
        **_rule(
            "type(self) == int ? self >= 0 && self <= 86400 : "
            "duration(self.matches('[a-z]$') ? self : self + 's') <= duration('24h')",
            "must be from 0 to 24h",
        ),
    ),
]
