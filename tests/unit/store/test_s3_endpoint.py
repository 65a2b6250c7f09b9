"""Bucket addresses: AWS and others, virtual hosts and paths."""

from __future__ import annotations

import pytest

from datastore.api.source import S3Location
from datastore.errors import InvalidRequest
from datastore.fuse.store.s3.endpoint import resolve


@pytest.mark.parametrize(
    ("location", "host_header", "path"),
    [
        (S3Location(bucket="data"), "data.s3.us-east-1.amazonaws.com", "/a%20b//c/"),
        (S3Location(bucket="data", region="eu-west-1"), "data.s3.eu-west-1.amazonaws.com", "/a%20b//c/"),
        (S3Location(bucket="data", region="cn-north-1"), "data.s3.cn-north-1.amazonaws.com.cn", "/a%20b//c/"),
        (S3Location(bucket="dotted.name"), "s3.us-east-1.amazonaws.com", "/dotted.name/a%20b//c/"),
        (S3Location(bucket="data", force_path_style=True), "s3.us-east-1.amazonaws.com", "/data/a%20b//c/"),
        (S3Location(bucket="data", endpoint="https://s3.lab.example"), "data.s3.lab.example", "/a%20b//c/"),
        (S3Location(bucket="data", endpoint="http://minio:9000"), "minio:9000", "/data/a%20b//c/"),
        (S3Location(bucket="data", endpoint="http://127.0.0.1:9000/"), "127.0.0.1:9000", "/data/a%20b//c/"),
        (S3Location(bucket="data", endpoint="http://[::1]:9000"), "[::1]:9000", "/data/a%20b//c/"),
        (
            S3Location(bucket="data", endpoint="https://gw.example:443/s3/", force_path_style=True),
            "gw.example",
            "/s3/data/a%20b//c/",
        ),
    ],
)
def test_a_key_has_one_address(location: S3Location, host_header: str, path: str) -> None:
    endpoint = resolve(location)
    assert endpoint.host_header == host_header
    assert endpoint.path("a b//c/") == path


def test_the_region_of_the_manifest_wins() -> None:
    assert resolve(S3Location(bucket="b-1", region="eu-west-1"), "us-west-2").region == "eu-west-1"
    assert resolve(S3Location(bucket="b-1"), "us-west-2").region == "us-west-2"


def test_only_aws_hosts_follow_the_region() -> None:
    aws = resolve(S3Location(bucket="data")).in_region("eu-west-1")
    other = resolve(S3Location(bucket="data", endpoint="https://s3.lab.example")).in_region("eu-west-1")
    assert aws.host == "data.s3.eu-west-1.amazonaws.com"
    assert (other.host, other.region) == ("data.s3.lab.example", "eu-west-1")


@pytest.mark.parametrize(
    ("endpoint", "here"),
    [
        ("http://127.0.0.1:9000", True),
        ("http://localhost:9000", True),
        ("http://[::1]:9000", True),
        ("http://10.0.0.1:9000", False),
        ("http://minio:9000", False),
        ("http://localhost.example", False),
    ],
)
def test_a_server_on_this_machine_is_told_by_its_address(endpoint: str, here: bool) -> None:
    assert resolve(S3Location(bucket="data", endpoint=endpoint)).on_this_machine is here


@pytest.mark.parametrize(
    "endpoint", ["minio:9000", "ftp://host", "https://", "http://h:port", "http://u:p@h", "http://h?q=1"]
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidRequest, match="endpoint"):
        resolve(S3Location(bucket="data", endpoint=endpoint))
