"""Makes volumes for the CSI controller service (datastore.csi.controller.Provisioner): each is a prefix of a bucket.

A volume's id has its location, since DeleteVolume gets only the id: `s3/ENDPOINT/BUCKET/CAPACITY/PREFIX`, with a
percent-encoded endpoint and the volume's first capacity. Only data with the volume's own marker is ever removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

from datastore.api.datastore import S3, DatastoreSpec
from datastore.api.resolve import source_of
from datastore.api.secretmanifest import SecretManifest
from datastore.api.source import S3Location
from datastore.api.volumecontext import from_context, to_context
from datastore.backends.base import Identity, Owner, Policy
from datastore.backends.s3 import S3Backend
from datastore.backends.stores import Stores
from datastore.csi.controller import Provisioned
from datastore.csi.errors import VolumeConflict
from datastore.errors import BucketNotFound, InvalidManifest
from datastore.fuse.store.s3 import open_s3
from datastore.secret import Secret

KIND = "s3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The location of a volume, which is encoded in the volume's id."""

    endpoint: str
    bucket: str
    capacity_bytes: int
    prefix: str

    def __str__(self) -> str:
        return "/".join((KIND, quote(self.endpoint, safe=""), self.bucket, str(self.capacity_bytes), self.prefix))

    @classmethod
    def parse(cls, volume_id: str) -> Place | None:
        """Parse a volume id; return None for an id of another form."""
        parts = volume_id.split("/", 4)
        if len(parts) != 5 or parts[0] != KIND or not parts[3].isdecimal():
            return None
        return cls(endpoint=unquote(parts[1]), bucket=parts[2], capacity_bytes=int(parts[3]), prefix=parts[4])


class S3Provisioner:
    """See Provisioner."""

    def __init__(self) -> None:
        self._stores = Stores(open_s3)

    def create(
        self, name: str, capacity_bytes: int, parameters: Mapping[str, str], secrets: Mapping[str, str]
    ) -> Provisioned:
        """See Provisioner. parameters: named like an inline volume's attributes."""
        spec = from_context(parameters)
        if not isinstance(spec, DatastoreSpec) or spec.s3 is None:
            raise InvalidManifest("parameters: bucket is missing")
        s3 = spec.s3.model_copy(update={"prefix": f"{spec.s3.prefix}{quote(name, safe='')}/", "create": True})
        place = Place(endpoint=s3.endpoint, bucket=s3.bucket, capacity_bytes=capacity_bytes, prefix=s3.prefix)
        if self._backend(s3, place, secrets).ensure().owner is not Owner.THIS:
            raise VolumeConflict(f"volume {name}: s3://{s3.bucket}/{s3.prefix} is taken, or of another capacity")
        shown = spec.model_copy(update={"s3": s3, "capacity": capacity_bytes})
        return Provisioned(
            volume_id=str(place), context=to_context(shown, class_name="its own"), capacity_bytes=capacity_bytes
        )

    def delete(self, volume_id: str, secrets: Mapping[str, str]) -> None:
        """See Provisioner."""
        place = Place.parse(volume_id)
        if place is None:
            return
        self._backend(_s3(place), place, secrets).release(Policy.DELETE, lambda: True)

    def exists(self, volume_id: str, context: Mapping[str, str], secrets: Mapping[str, str]) -> bool:
        """See Provisioner."""
        place = Place.parse(volume_id)
        if place is None:
            return False
        try:
            # owner() only reads the marker, and makes nothing.
            return self._backend(_s3(place), place, secrets).owner() is Owner.THIS
        except BucketNotFound:
            return False

    def _backend(self, s3: S3, place: Place, secrets: Mapping[str, str]) -> S3Backend:
        values = {name: Secret(text) for name, text in secrets.items()}
        secret = SecretManifest(name="of the request", namespace="", values=values)
        location = source_of(DatastoreSpec.model_validate({"s3": s3}), secret if secrets else None)
        assert isinstance(location, S3Location), "a spec with s3 is one"
        identity = Identity(namespace="", name=place.prefix, uid=str(place))
        return S3Backend(location, identity, self._stores, writable=True)


def _s3(place: Place) -> S3:
    given = {"bucket": place.bucket, "prefix": place.prefix, "endpoint": place.endpoint}
    return S3.model_validate({name: text for name, text in given.items() if text})
