"""Where keys come from: a Secret manifest, or botocore's default chain (environment, profile, SSO, web identity,
container, IMDS). botocore finds and renews the keys; nothing else of it is used at run time.

Any thread may call `keys()`; botocore's own lock serialises renewals. Each request calls it again and gets one frozen
set of keys, so a renewal never mixes two sets.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

from datastore.api.source import S3Location, StaticCredentials
from datastore.errors import CredentialsInvalid
from datastore.secret import Secret

from .errors import one_line

_LOOKUP_TIMEOUT_S = 2
"""Timeout for STS, SSO and the container endpoint: they are local or near, and a mount must be refused within 5 s."""
_METADATA_TIMEOUT_S = 1
LOOK_AGAIN_S = 5.0
PROCESS_S = 30.0
"""How long a credential_process may take; it may ask a person."""
_KILLED_S = 1.0
_HUNG = f"credential_process of the AWS configuration has not ended within {PROCESS_S:.0f} s"
_NONE_FOUND = (
    "no credentials found: the environment, AWS profiles, SSO, web identity, container and instance metadata were"
    " asked; name a credentialsSecret in the manifest, or run `aws configure`"
)


class StaticSource:
    """Keys from a Secret. While the bucket is mounted, replace() changes them, and offer() names others, which are used
    when the server refuses the present ones."""

    region = ""
    """The region that is configured beside the keys; a Secret names none."""

    def __init__(self, given: StaticCredentials) -> None:
        self._keys = self._offered = given

    def replace(self, given: StaticCredentials) -> None:
        """Set the keys for later requests; requests under way keep theirs."""
        self._keys = self._offered = given

    def offer(self, given: StaticCredentials) -> None:
        """Name the keys that take over when the server refuses the present ones."""
        self._offered = given

    def identity(self) -> str:
        """Return an id that is not secret; keys with equal ids have one user, who may see what was read with either."""
        return _digest("key", self._keys.access_key_id)

    def at_hand(self) -> StaticCredentials | None:
        """Return keys(), or None if they have to be looked up first, which may ask the network."""
        return self._keys

    def keys(self) -> StaticCredentials:
        """Return the present keys."""
        return self._keys

    def refused(self, keys: StaticCredentials) -> bool:
        """Return whether there are other keys by now than these, which the server refused."""
        if keys == self._keys:
            self._keys = self._offered
        return keys != self._keys


class ChainSource:
    """botocore's default chain, asked at first use; its credentials are kept, and refreshable ones renew themselves.

    When the server refuses them, the chain is asked again: a credentials file may have been rewritten. Errors of
    identity() and keys(): CredentialsInvalid.
    """

    def __init__(
        self,
        session: Any,
        again: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        region: str = "",
    ) -> None:
        """again: returns a new session, which reads all files again."""
        self.region = region
        self._session = session
        self._again = again or chain_session
        self._clock = clock
        self._looked_at = -math.inf
        self._lock = threading.Lock()
        self._found: Any = None

    def identity(self) -> str:
        """See StaticSource. Keys that renew themselves get another access key id each hour; they are identified by how
        they were found, the profile, and the role that the environment names."""
        from botocore.credentials import RefreshableCredentials

        keys, found = self.keys(), self._credentials()
        if not isinstance(found, RefreshableCredentials):
            return _digest("key", keys.access_key_id)
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
        except (BotoCoreError, ClientError, OSError, ValueError, RuntimeError) as error:
            # The last three: a credential_process or token file that is missing, gives no JSON, or gives expired keys.
            raise CredentialsInvalid(f"looking for credentials failed: {one_line(str(error))}") from error
        token = Secret(frozen.token) if frozen.token else None
        return StaticCredentials(
            access_key_id=frozen.access_key, secret_access_key=Secret(frozen.secret_key), session_token=token
        )

    def refused(self, keys: StaticCredentials) -> bool:
        """See StaticSource. The chain is asked at most every LOOK_AGAIN_S seconds, since it may ask the network."""
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
                chain = self._session.get_component("credential_provider")
                chain.get_provider("custom-process")._popen = CredentialProcess  # botocore itself sets no limit
                self._found = chain.load_credentials()
            if self._found is None:
                raise CredentialsInvalid(_NONE_FOUND)
            return self._found


class CredentialProcess(subprocess.Popen[bytes]):
    """A credential_process. It is killed after PROCESS_S, and for LOOK_AGAIN_S after that none is started: every call
    of the mount may wait for it, one after the other."""

    hung_at: ClassVar[float] = -math.inf

    def __init__(self, *args: Any, **options: Any) -> None:
        """Errors: OSError."""
        if time.monotonic() - CredentialProcess.hung_at < LOOK_AGAIN_S:
            raise TimeoutError(_HUNG)
        super().__init__(*args, **options)

    def communicate(self, input: bytes | None = None, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Return what it printed. Errors: TimeoutError."""
        try:
            return super().communicate(input, PROCESS_S if timeout is None else timeout)
        except subprocess.TimeoutExpired:
            CredentialProcess.hung_at = time.monotonic()
            self.kill()
            with suppress(subprocess.TimeoutExpired):
                super().communicate(timeout=_KILLED_S)
            raise TimeoutError(_HUNG) from None


CredentialSource = StaticSource | ChainSource


def find_source(location: S3Location) -> CredentialSource:
    """Return the source of a location's keys. Errors: CredentialsInvalid."""
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
    """Return a botocore session with short timeouts. Importing botocore takes 0.1 s, which static keys don't need."""
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
