"""datastore.api.endpoints: which servers may be named, and at which addresses they may be."""

from __future__ import annotations

import pytest

from datastore.api.endpoints import EndpointPolicy, policy_from
from tests.promises import promise

ANY = EndpointPolicy()


@promise("S-116")
@pytest.mark.parametrize(
    ("endpoint", "pattern", "expected"),
    [
        ("https://s3.example.org", "https://s3.example.org", True),
        ("https://s3.example.org:443", "https://s3.example.org", True),
        ("https://s3.example.org.", "https://s3.example.org", True),
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
    assert EndpointPolicy(endpoints=(pattern,)).allows(endpoint) is expected


def test_without_a_list_every_endpoint_is_allowed() -> None:
    assert ANY.allows("")
    assert ANY.allows("http://10.0.0.1:9000")


INSIDE = ["127.0.0.1", "::1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "fd12::1", "64:ff9b:1::1"]
METADATA = [
    "169.254.169.254",
    "169.254.170.2",
    "fe80::a9fe:a9fe%eth0",
    "fd00:ec2::254",
    "fd00:ec2::23",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "fd20:ce::254",
    "0.0.0.0",
    "::",
    "255.255.255.255",
    "224.0.0.1",
    "ff02::1",
]
IN_DISGUISE = [
    "::ffff:169.254.169.254",
    "::ffff:10.0.0.1",
    "::169.254.169.254",
    "::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b::10.0.0.1",
    "2002:a9fe:a9fe::1",
    "2002:7f00:1::",
    "2001:0:a9fe:a9fe::1",
    "fe80::5efe:10.0.0.1",
    "2a00:1450::5efe:169.254.169.254",
    "2a00:1450::200:5efe:127.0.0.1",
]


@promise("S-203")
@pytest.mark.parametrize("address", INSIDE + METADATA + IN_DISGUISE)
def test_addresses_inside_the_cluster_are_denied(address: str) -> None:
    assert ANY.refusal("https://s3.example.org", address)


@pytest.mark.parametrize("address", ["52.95.150.5", "2600:1f60::1", "64:ff9b::5.6.7.8", "2002:506:708::1", "8.8.8.8"])
def test_addresses_outside_the_cluster_are_allowed(address: str) -> None:
    assert ANY.refusal("", address) == ""


@promise("S-203")
@pytest.mark.parametrize("address", INSIDE)
def test_the_administrator_names_a_host_in_full_or_a_range(address: str) -> None:
    named = EndpointPolicy(endpoints=("http://minio.store:9000",))
    assert named.refusal("http://minio.store:9000", address) == ""
    assert named.refusal("http://minio.store:9001", address)
    pattern = EndpointPolicy(endpoints=("http://*.store:9000",))
    assert pattern.refusal("http://minio.store:9000", address)
    everything = ("0.0.0.0/0", "::/0")
    assert EndpointPolicy(allow_ranges=everything).refusal("", address)
    assert EndpointPolicy(allow_ranges=(address,)).refusal("", address) == ""


@promise("S-203")
@pytest.mark.parametrize("address", METADATA)
def test_no_name_leads_to_a_metadata_service(address: str) -> None:
    """The owner of a DNS name could point it there."""
    open_ = EndpointPolicy(endpoints=("http://minio.store",), allow_ranges=("10.0.0.0/8", "fc00::/7", "100.64.0.0/10"))
    assert open_.refusal("http://minio.store", address)
    assert EndpointPolicy(allow_ranges=(address.partition("%")[0],)).refusal("", address) == ""


@promise("S-203")
def test_the_smaller_of_two_ranges_decides() -> None:
    policy = EndpointPolicy(
        endpoints=("http://minio.store",),
        allow_ranges=("10.0.0.0/8", "10.96.7.0/24", "192.168.0.0/16"),
        deny_ranges=("10.96.0.0/12", "192.168.0.0/16", "203.0.113.0/24"),
    )
    assert policy.refusal("", "10.1.2.3") == ""
    assert policy.refusal("", "::ffff:10.1.2.3") == ""
    assert policy.refusal("", "10.97.2.3") == "an address that the administrator denies"
    assert policy.refusal("", "10.96.7.1") == ""
    assert policy.refusal("", "192.168.1.1") == ""
    assert policy.refusal("http://minio.store", "203.0.113.9") == "an address that the administrator denies"


@promise("S-203")
def test_the_policy_and_the_api_servers_address_come_from_the_environment() -> None:
    """The API server is denied even if its range is allowed."""
    policy = policy_from(
        {
            "ALLOW_ENDPOINTS": " https://a, http://b:1,,\nhttps://*.c ",
            "ALLOW_RANGES": "10.0.0.0/8",
            "DENY_RANGES": "10.1.0.0/16",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        },
        ("https://d",),
        ("192.168.0.0/16",),
    )
    assert policy == EndpointPolicy(
        endpoints=("https://a", "http://b:1", "https://*.c", "https://d"),
        allow_ranges=("10.0.0.0/8", "192.168.0.0/16"),
        deny_ranges=("10.1.0.0/16", "10.96.0.1/32"),
    )
    assert (policy.refusal("", "10.96.0.1"), policy.refusal("", "10.96.0.2")) == (
        "an address that the administrator denies",
        "",
    )
    assert policy_from({}) == ANY
    assert policy_from({"KUBERNETES_SERVICE_HOST": "fd00::1"}).deny_ranges == ("fd00::1/128",)


@pytest.mark.parametrize("text", ["10.0.0.0/33", "10.0.0.1/8", "minio.store"])
def test_an_invalid_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"10\.0\.0\.0/8"):
        policy_from({"DENY_RANGES": text})
