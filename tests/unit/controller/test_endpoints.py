"""datastore.api.endpoints: whom a user may have the controller ask, and a node."""

from __future__ import annotations

import pytest

from datastore.api.endpoints import allowed, listed
from datastore.controller.classes import meant
from datastore.controller.settings import Settings
from tests.unit.controller.test_classes import OF_CLASS, SHARED, body, refused, storage_class


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://169.254.169.254",
        "http://169.254.169.254:8080",
        "http://[fe80::1]:80",
        "http://[::ffff:169.254.169.254]",
        "http://2852039166",
        "http://0xa9fea9fe",
        "http://0251.0376.0251.0376",
    ],
)
def test_a_link_local_address_is_never_asked_by_chance(endpoint: str) -> None:
    """S-116"""
    assert not allowed(endpoint, ())
    assert allowed(endpoint, (endpoint,))


@pytest.mark.parametrize(
    "endpoint", ["", "https://s3.example.org", "http://10.0.0.1:9000", "http://minio", "http://[::1]"]
)
def test_without_a_list_everything_else_is(endpoint: str) -> None:
    assert allowed(endpoint, ())


@pytest.mark.parametrize(
    ("endpoint", "pattern", "expected"),
    [
        ("https://s3.example.org", "https://s3.example.org", True),
        ("https://S3.example.org", "https://*.example.org", True),
        ("https://example.org", "https://*.example.org", False),
        ("http://s3.example.org", "https://*.example.org", False),
        ("https://s3.example.org:444", "https://*.example.org", False),
        ("https://s3.example.org.evil.net", "https://*.example.org", False),
        ("http://minio.store:9000", "http://minio.store:9000", True),
        ("", "https://*.amazonaws.com", True),
        ("", "https://*.example.org", False),
    ],
)
def test_a_list_names_scheme_host_and_port(endpoint: str, pattern: str, expected: bool) -> None:
    """S-116"""
    assert allowed(endpoint, (pattern,)) is expected


def test_the_list_of_the_environment() -> None:
    assert listed(" https://a, http://b:1,,\nhttps://*.c ") == ("https://a", "http://b:1", "https://*.c")
    assert listed("") == ()


def test_it_holds_for_users_and_not_for_the_administrators_classes() -> None:
    """S-116"""
    only = Settings(endpoints=("https://s3.example.org",))
    inside = {"bucket": "digits", "credentialsSecret": "keys", "endpoint": "http://10.0.0.1:2379"}
    assert meant(body({"s3": inside}), None, Settings()).spec.s3 is not None
    text = refused({"s3": inside}, settings=only)
    assert text == "EndpointNotAllowed: spec.s3.endpoint: the administrator does not allow http://10.0.0.1:2379"
    classed = storage_class(**SHARED, endpoint="http://10.0.0.1:9000")
    assert meant(body(OF_CLASS), classed, only).spec.s3 is not None
