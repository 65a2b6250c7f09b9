from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.csi.driver import Driver, Pod, context_of, secrets_of
from tests.servers import Server, boto_client, make_bucket

pytestmark = pytest.mark.fuse


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield a directory with a short path, because it holds sockets."""
    made = Path(tempfile.mkdtemp(prefix="csi-", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def driver(directory: Path) -> Iterator[Driver]:
    """Yield both processes while they run."""
    made = Driver(directory)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def bucket(versitygw: Server, request: pytest.FixtureRequest) -> str:
    name = "b-" + "".join(each if each.isalnum() else "-" for each in request.node.name.lower())[-50:].strip("-")
    return make_bucket(versitygw, name)


@pytest.fixture
def pod(driver: Driver, versitygw: Server, bucket: str) -> Callable[..., Pod]:
    """Return a function that makes pods of one volume, by name."""

    def make(name: str = "pod-a", **more: object) -> Pod:
        given = {"context": context_of(versitygw, bucket), "secrets": secrets_of(versitygw)} | more
        return Pod(driver=driver, volume_id="team/data/1234", name=name, **given)  # type: ignore[arg-type]

    return make


@pytest.fixture
def versitygw_put(versitygw: Server, bucket: str) -> Callable[[str, bytes], None]:
    """Return a function that writes as another client."""
    client = boto_client(versitygw)
    return lambda key, body: client.put_object(Bucket=bucket, Key=key, Body=body)


@pytest.fixture
def stored(versitygw: Server, bucket: str) -> Callable[[str], bytes]:
    """Return a function that reads a key of the bucket."""
    client = boto_client(versitygw)
    return lambda key: client.get_object(Bucket=bucket, Key=key)["Body"].read()
