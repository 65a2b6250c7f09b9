"""Puts an S3 store together from a location: credentials, endpoint, proxy, TLS, client, retries, metrics."""

from __future__ import annotations

from functools import partial

from datastore.api.endpoints import AWS
from datastore.api.source import S3Location
from datastore.errors import EndpointNotAllowed

from ..backoff import Retrier
from ..base import Capabilities
from ..metrics import StoreMetrics
from ..retrying import RetryingStore
from .caller import Caller
from .client import S3Store
from .credentials import CredentialSource, find_source
from .dialing import Route, proxy_for, trust
from .endpoint import Endpoint, resolve
from .transport import Transport, TransportLimits


def gather(
    location: S3Location, limits: TransportLimits, keys: CredentialSource | None = None, *, follow: bool = True
) -> Caller:
    """Resolve a location; touches no network. Errors: InvalidRequest, CredentialsInvalid, EndpointNotAllowed."""
    policy = location.policy
    if policy is not None and not policy.allows(location.endpoint):
        raise EndpointNotAllowed(
            f"spec.s3.endpoint: the administrator does not allow {location.endpoint or AWS} (ALLOW_ENDPOINTS)"
        )
    refusal = None if policy is None else partial(policy.refusal, location.endpoint)
    credentials = keys or find_source(location)
    endpoint = resolve(location, credentials.region)
    proxy = proxy_for(endpoint.host, secure=endpoint.secure)
    tls = trust(location.ca_bundle) if endpoint.secure else None

    def connect(to: Endpoint) -> Transport:
        return Transport(Route(to.host, to.port, to.secure, proxy, refusal), tls=tls, limits=limits)

    return Caller(endpoint, credentials, connect, follow=follow)


def open_s3(
    location: S3Location,
    *,
    capabilities: Capabilities | None = None,
    retrier: Retrier | None = None,
    limits: TransportLimits | None = None,
    metrics: StoreMetrics | None = None,
    keys: CredentialSource | None = None,
    list_metadata: bool = False,
) -> RetryingStore:
    """A store to work with: retries and metrics in front of the adapter.

    capabilities: from probe(); conservative when not given. keys: in place of what the location says about credentials.
    list_metadata: listings are to show the objects' metadata where the server can do that.

    Touches no network; probe() tells whether the location is right. Errors: InvalidRequest, CredentialsInvalid.
    """
    caller = gather(location, limits or TransportLimits(), keys)
    adapter = S3Store(caller, capabilities or Capabilities(), list_metadata=list_metadata)
    return RetryingStore(adapter, retrier, metrics)
