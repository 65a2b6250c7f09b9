"""datastore.controller.datastores.settings and __main__: what the command line and the environment choose."""

from __future__ import annotations

import pytest

from datastore.controller.__main__ import _arguments, _settings
from datastore.controller.datastores.settings import Settings
from tests.promises import promise


def given(*arguments: str) -> Settings:
    return _settings(_arguments().parse_args(arguments))


@promise("S-113", "S-115")
def test_features_that_need_rights_are_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WATCH_SECRETS", "PROBE_CLAIMS"):
        monkeypatch.delenv(name, raising=False)
    assert (given().watch_secrets, given().probe_claims) == (False, False)
    monkeypatch.setenv("WATCH_SECRETS", "true")
    monkeypatch.setenv("PROBE_CLAIMS", "true")
    assert (given().watch_secrets, given().probe_claims) == (True, True)
    monkeypatch.setenv("WATCH_SECRETS", "false")
    assert not given().watch_secrets
