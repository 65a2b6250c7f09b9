"""The address of a bucket: scheme, host, path prefix; virtual-host or path style; AWS's hosts by region.

Pure. Source: "Virtual hosting of general purpose buckets" and "Amazon S3 endpoints", AWS documentation.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from functools import cached_property
from urllib.parse import urlsplit

from datastore.api.source import S3Location
from datastore.errors import InvalidRequest

from .sigv4 import encode_path

DEFAULT_REGION = "us-east-1"
_DNS_BUCKET = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
"""Bucket names that can be one label of a host name; names with dots would not match a wildcard certificate."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A bucket's address. base_path is '' or starts with '/'; aws: the host's name depends on the region."""

    scheme: str
    service_host: str
    port: int
    base_path: str
    bucket: str
    region: str
    path_style: bool
    aws: bool

    @cached_property
    def host(self) -> str:
        """The host to connect to."""
        return self.service_host if self.path_style else f"{self.bucket}.{self.service_host}"

    @cached_property
    def host_header(self) -> str:
        """The Host header, with the port if that is not the default of the scheme."""
        return self._authority(self.host)

    @property
    def secure(self) -> bool:
        """Whether the bucket is reached over TLS."""
        return self.scheme == "https"

    @cached_property
    def on_this_machine(self) -> bool:
        """Whether the server is on this machine (a gateway beside the mount), so that bytes pass no network."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def service_url(self) -> str:
        """The endpoint without the bucket, for messages and other clients."""
        return f"{self.scheme}://{self._authority(self.service_host)}{self.base_path}"

    def _authority(self, host: str) -> str:
        name = f"[{host}]" if ":" in host else host
        return name if self.port == _default_port(self.scheme) else f"{name}:{self.port}"

    @cached_property
    def _bucket_path(self) -> str:
        return f"{self.base_path}/{encode_path(self.bucket)}" if self.path_style else self.base_path

    def path(self, key: str = "") -> str:
        """Return the encoded path of a key, or of the bucket."""
        return f"{self._bucket_path}/{encode_path(key)}" if key else self._bucket_path or "/"

    def in_region(self, region: str) -> Endpoint:
        """Return the endpoint of the same bucket in another region."""
        host = _aws_host(region) if self.aws else self.service_host
        return replace(self, region=region, service_host=host)


def resolve(location: S3Location, region: str = "") -> Endpoint:
    """Return the endpoint of a location; `region` is used when the location names none.
    Errors: InvalidRequest when the endpoint is not an http(s) URL."""
    where = location.region or region or DEFAULT_REGION
    aws = not location.endpoint
    scheme, host, port, base_path = ("https", _aws_host(where), 443, "") if aws else _split(location.endpoint)
    return Endpoint(
        scheme=scheme,
        service_host=host,
        port=port,
        base_path=base_path,
        bucket=location.bucket,
        region=where,
        path_style=location.force_path_style or _needs_path_style(host, location.bucket),
        aws=aws,
    )


def _split(endpoint: str) -> tuple[str, str, int, str]:
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError as error:
        raise InvalidRequest(f"endpoint {endpoint!r} is not a URL: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise InvalidRequest(f"endpoint {endpoint!r} is not a URL such as https://s3.example.com:9000")
    return parts.scheme, parts.hostname, port or _default_port(parts.scheme), parts.path.rstrip("/")


def _needs_path_style(host: str, bucket: str) -> bool:
    """Whether the bucket can't be a subdomain: addresses and single-label hosts (localhost, a service) have none."""
    if not _DNS_BUCKET.fullmatch(bucket) or "." not in host:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _aws_host(region: str) -> str:
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    return f"s3.{region}.{suffix}"


def _default_port(scheme: str) -> int:
    return 443 if scheme == "https" else 80
