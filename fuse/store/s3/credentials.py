"""Where keys come from: a Secret manifest, or botocore's default chain (environment, profile, SSO, web identity,
container, IMDS). botocore finds and renews; nothing else of it is used at run time.

Threads: `keys()` may be called from any; renewals are serialised by botocore's own lock. Each request asks again and
gets one frozen set, so a renewal never mixes two.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from datastore.api.source import S3Location, StaticCredentials
from datastore.errors import CredentialsInvalid
from datastore.secret import Secret

from .errors import one_line

_LOOKUP_TIMEOUT_S = 2
"""For STS, SSO and the container endpoint: a lookup is local or near, and a mount must be refused within 5 s."""
_METADATA_TIMEOUT_S = 1
LOOK_AGAIN_S = 5.0
_NONE_FOUND = (
    "no credentials found: the environment, AWS profiles, SSO, web identity, container and instance metadata were"
    " asked; name a credentialsSecret in the manifest, or run `aws configure`"
)


class StaticSource:
    """Keys from a Secret; they change when who mounted brings others."""

    region = ""
    """As the configuration beside the keys names it."""

    def __init__(self, given: StaticCredentials) -> None:
        self._keys = given

    def replace(self, given: StaticCredentials) -> None:
        """The keys from now on; requests under way keep theirs."""
        self._keys = given

    def identity(self) -> str:
        """Equal for those who may see what the other has read: the same person, as far as can be told. No secret."""
        return _digest("key", self._keys.access_key_id)

    def at_hand(self) -> StaticCredentials | None:
        """keys(), where it need not look for them first, which may ask the network."""
        return self._keys

    def keys(self) -> StaticCredentials:
        """The present ones."""
        return self._keys

    def refused(self, keys: StaticCredentials) -> bool:
        """The server does not take these keys: whether there are others by now."""
        return keys != self._keys


class ChainSource:
    """botocore's default chain, asked at first use and kept; its refreshable credentials renew themselves.

    Others (a credentials file that was rewritten) are looked for again when the server refuses those we have. Errors of
    identity() and keys(): CredentialsInvalid.
    """

    def __init__(
        self,
        session: Any,
        again: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        region: str = "",
    ) -> None:
        """again: makes another session, which reads every file anew."""
        self.region = region
        self._session = session
        self._again = again or chain_session
        self._clock = clock
        self._looked_at = -math.inf
        self._lock = threading.Lock()
        self._found: Any = None

    def identity(self) -> str:
        """See StaticSource. Keys that renew themselves have another id each hour: of those how they were found, and the
        role that the environment names."""
        from botocore.credentials import RefreshableCredentials

        found = self._credentials()
        if not isinstance(found, RefreshableCredentials):
            return _digest("key", self.keys().access_key_id)
        return _digest(found.method or "", self._session.profile or "", os.environ.get("AWS_ROLE_ARN", ""))

    def at_hand(self) -> StaticCredentials | None:
        from botocore.credentials import RefreshableCredentials

        found = self._found
        if found is None or (isinstance(found, RefreshableCredentials) and found.refresh_needed()):
            return None
        return self.keys()

    def keys(self) -> StaticCredentials:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            frozen = self._credentials().get_frozen_credentials()
        except (BotoCoreError, ClientError) as error:
            raise CredentialsInvalid(f"looking for credentials failed: {one_line(str(error))}") from error
        token = Secret(frozen.token) if frozen.token else None
        return StaticCredentials(
            access_key_id=frozen.access_key, secret_access_key=Secret(frozen.secret_key), session_token=token
        )

    def refused(self, keys: StaticCredentials) -> bool:
        """See StaticSource. Looks at most every LOOK_AGAIN_S: a lookup may ask the network."""
        with self._lock:
            if self._clock() - self._looked_at >= LOOK_AGAIN_S:
                self._looked_at = self._clock()
                self._session, self._found = self._again(), None
        try:
            return self.keys() != keys
        except CredentialsInvalid:
            return False

    def _credentials(self) -> Any:
        found = self._found
        if found is not None:
            return found
        with self._lock:
            if self._found is None:
                self._found = self._session.get_credentials()
            if self._found is None:
                raise CredentialsInvalid(_NONE_FOUND)
            return self._found


CredentialSource = StaticSource | ChainSource


def find_source(location: S3Location) -> CredentialSource:
    """The source of a location's keys. Errors: CredentialsInvalid."""
    if location.credentials is not None:
        return StaticSource(location.credentials)
    from botocore.exceptions import BotoCoreError

    session = chain_session()
    try:
        region = session.get_config_variable("region") or ""
    except BotoCoreError as error:
        raise CredentialsInvalid(f"the AWS configuration is wrong: {one_line(str(error))}") from error
    return ChainSource(session, region=str(region))


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def chain_session() -> Any:
    """A botocore session whose lookups give up soon. botocore is imported here: 0.1 s that static keys don't need."""
    import botocore.session
    from botocore.config import Config

    session = botocore.session.Session()
    session.set_config_variable("metadata_service_timeout", _METADATA_TIMEOUT_S)
    session.set_config_variable("metadata_service_num_attempts", 1)
    session.set_default_client_config(
        Config(
            connect_timeout=_LOOKUP_TIMEOUT_S,
            read_timeout=_LOOKUP_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": 2},
        )
    )
    return session
