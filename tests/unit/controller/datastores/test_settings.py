"""datastore.controller.datastores.settings and __main__: what the command line and the environment choose."""

from __future__ import annotations

import pytest

from datastore.controller.__main__ import _arguments, _settings
from datastore.controller.datastores.settings import Settings
from tests.promises import promise


def given(*arguments: str) -> Settings:
    return _settings(_arguments().parse_args(arguments))


def test_without_namespaces_all_are_served() -> None:
    found = given()
    assert (found.watched_namespaces, found.serves("any")) == ((), True)


@promise("S-114")
@pytest.mark.parametrize("how", ["arguments", "environment"])
def test_with_namespaces_these_and_its_own_are(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Its own is always watched, because its Lease is there."""
    monkeypatch.setenv("POD_NAMESPACE", "ours")
    monkeypatch.setenv("NAMESPACES", "a, b" if how == "environment" else "")
    arguments = ("--namespace", "a", "--namespace", "b") if how == "arguments" else ()
    found = given(*arguments)
    assert found.watched_namespaces == ("a", "b", "ours")
    assert [found.serves(each) for each in ("a", "ours", "c")] == [True, True, False]


@promise("S-113", "S-115")
def test_what_takes_rights_is_off_unless_it_is_given_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WATCH_SECRETS", "PROBE_CLAIMS"):
        monkeypatch.delenv(name, raising=False)
    assert (given().watch_secrets, given().probe_claims) == (False, False)
    monkeypatch.setenv("WATCH_SECRETS", "true")
    monkeypatch.setenv("PROBE_CLAIMS", "true")
    assert (given().watch_secrets, given().probe_claims) == (True, True)
    monkeypatch.setenv("WATCH_SECRETS", "false")
    assert not given().watch_secrets
