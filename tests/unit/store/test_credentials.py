"""Where keys come from, and that they are renewed."""

from __future__ import annotations

import json
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from datastore.api.source import S3Location, StaticCredentials
from datastore.errors import CredentialsInvalid, StoreError
from datastore.fuse.store.s3 import credentials
from datastore.fuse.store.s3.credentials import (
    LOOK_AGAIN_S,
    ChainSource,
    CredentialProcess,
    StaticSource,
    chain_session,
    find_source,
)
from datastore.secret import Secret
from tests.driving import resolve, the_loop
from tests.mount.mounts import runs
from tests.patience import eventually
from tests.promises import promise
from tests.unit.store.scripted import ScriptedServer, http
from tests.unit.store.test_s3_client import client_of

CHAIN = S3Location(bucket="data")


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No credentials anywhere."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


def given(key: str, secret: str = "s", token: str = "") -> StaticCredentials:
    session = Secret(token) if token else None
    return StaticCredentials(access_key_id=key, secret_access_key=Secret(secret), session_token=session)


def test_keys_of_the_manifest_are_used_as_they_are(empty_home: Path) -> None:
    source = find_source(S3Location(bucket="data", credentials=given("AKID", "secret", "token")))
    assert (source.keys().access_key_id, source.keys().secret_access_key.reveal()) == ("AKID", "secret")
    assert source.keys().session_token == Secret("token")
    assert source.region == ""


def test_a_profile_gives_keys_and_region(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty_home / "credentials").write_text("[lab]\naws_access_key_id = PROFKEY\naws_secret_access_key = s\n")
    (empty_home / "config").write_text("[profile lab]\nregion = eu-central-1\n")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    source = find_source(CHAIN)
    assert (source.keys().access_key_id, source.region) == ("PROFKEY", "eu-central-1")


@promise("S-65")
@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("credential_process = /no/such/program", "/no/such/program"),
        ("credential_process = echo nonsense", "Expecting value"),
        (
            'credential_process = echo \'{"Version": 1, "AccessKeyId": "K", "SecretAccessKey": "s",'
            ' "SessionToken": "t", "Expiration": "2020-01-01T00:00:00Z"}\'',
            "expired",
        ),
        ("role_arn = arn:aws:iam::1:role/r\nweb_identity_token_file = /no/token", "/no/token"),
    ],
)
def test_a_source_that_gives_no_keys_is_told_as_such(empty_home: Path, config: str, why: str) -> None:
    (empty_home / "config").write_text(f"[default]\nregion = eu-central-1\n{config}\n")
    for ask in (ChainSource.keys, ChainSource.identity):
        source = find_source(CHAIN)
        assert isinstance(source, ChainSource)
        with pytest.raises(CredentialsInvalid, match=why):
            ask(source)


def test_a_profile_that_does_not_exist_is_named(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    with pytest.raises(CredentialsInvalid, match="nowhere"):
        find_source(CHAIN).keys()


def test_nothing_found_says_where_it_was_looked_for(empty_home: Path) -> None:
    for ask in (find_source(CHAIN).keys, find_source(CHAIN).identity):
        with pytest.raises(CredentialsInvalid, match=r"no credentials found.*credentialsSecret"):
            ask()


def helper_profile(home: Path, body: str) -> None:
    script = home / "helper.py"
    script.write_text(body)
    (home / "config").write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")


def expiring_keys(home: Path) -> None:
    """Others each time, which must be renewed before they are used."""
    soon = (datetime.now(UTC) + timedelta(seconds=30)).isoformat()
    answer = {"Version": 1, "SecretAccessKey": "s", "SessionToken": "t", "Expiration": soon}
    helper_profile(
        home, f"import json, os; print(json.dumps({json.dumps(answer)} | {{'AccessKeyId': f'KEY{{os.getpid()}}'}}))\n"
    )


def test_a_helper_that_fails_is_an_error_with_its_words(empty_home: Path) -> None:
    helper_profile(empty_home, "raise SystemExit('token expired, log in again')\n")
    with pytest.raises(CredentialsInvalid, match="log in again"):
        find_source(CHAIN).keys()


@promise("S-65")
def test_a_helper_that_hangs_is_ended_and_not_started_again_at_once(
    empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many calls that wait for keys get the error together."""
    monkeypatch.setattr(credentials, "PROCESS_S", 0.5)
    monkeypatch.setattr(CredentialProcess, "hung_at", CredentialProcess.hung_at)
    pids = empty_home / "pids"
    helper_profile(empty_home, f"import os, time; print(os.getpid(), file=open({str(pids)!r}, 'a')); time.sleep(600)\n")
    for _ in range(5):
        with pytest.raises(CredentialsInvalid, match=r"credential_process .* has not ended within"):
            find_source(CHAIN).keys()
    (pid,) = pids.read_text().split()
    eventually(lambda: not runs(int(pid)), "it has ended")


def write_keys(home: Path, access_key: str) -> None:
    (home / "credentials").write_text(f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = s\n")


@promise("S-65")
def test_a_credentials_file_that_was_rewritten_is_read_when_the_server_refuses_the_old_keys(empty_home: Path) -> None:
    write_keys(empty_home, "OLD")
    source = find_source(CHAIN)
    old = source.keys()
    write_keys(empty_home, "NEW")
    assert source.keys() == old
    assert source.refused(old)
    assert source.keys().access_key_id == "NEW"
    assert source.refused(old)


def test_it_is_not_looked_for_others_all_the_time(empty_home: Path) -> None:
    now_s, sessions = [100.0], []

    def again() -> Any:
        sessions.append(chain_session())
        return sessions[-1]

    write_keys(empty_home, "OLD")
    source = ChainSource(chain_session(), again, clock=lambda: now_s[0])
    old = source.keys()
    assert not source.refused(old)
    write_keys(empty_home, "NEW")
    assert not source.refused(old)
    now_s[0] += LOOK_AGAIN_S
    assert source.refused(old)
    assert len(sessions) == 2


def test_a_file_that_is_gone_is_no_other_key(empty_home: Path) -> None:
    write_keys(empty_home, "OLD")
    source = find_source(CHAIN)
    old = source.keys()
    (empty_home / "credentials").unlink()
    assert not source.refused(old)
    with pytest.raises(CredentialsInvalid, match="no credentials found"):
        source.keys()


def test_keys_of_a_manifest_are_others_once_they_were_replaced() -> None:
    source = StaticSource(given("A"))
    refused = source.keys()
    assert not source.refused(refused)
    source.replace(given("B"))
    assert source.refused(refused)


def test_keys_that_were_offered_take_over_when_the_present_ones_are_refused() -> None:
    source = StaticSource(given("A"))
    source.offer(given("B"))
    assert source.keys() == given("A")
    assert source.refused(given("A"))
    assert source.keys() == given("B")
    assert source.refused(given("A")), "as another thread sees that used the former keys at the same time"
    assert not source.refused(given("B"))


@pytest.mark.parametrize("expiring", [False, True])
def test_a_loop_does_not_look_for_keys_itself(expiring: bool, empty_home: Path) -> None:
    """A lane does: at first, when they have to be renewed, and when the server takes them no more."""
    asked: list[str] = []

    class Noted(ChainSource):
        def keys(self) -> StaticCredentials:
            asked.append(f"keys by {threading.current_thread().name[:5]}")
            return super().keys()

        def refused(self, keys: StaticCredentials) -> bool:
            asked.append(f"refused by {threading.current_thread().name[:5]}")
            return super().refused(keys)

    if expiring:
        expiring_keys(empty_home)
    else:
        write_keys(empty_home, "OLD")
    source = Noted(chain_session())
    assert source.at_hand() is None
    with ScriptedServer([http(200, b"", 'ETag: "e"')] * 2 + [http(403)]) as server:
        store = client_of(server, keys=source).inner
        for _ in range(2):
            resolve(store.head("k"))
        assert (source.at_hand() is None) is expiring
        with pytest.raises(StoreError):
            resolve(store.head("k"))
        the_loop().call(store.close)
    assert asked[:2] == ["keys by lane-", "keys by lane-" if expiring else "keys by tests"]
    assert "refused by lane-" in asked


@promise("S-205")
def test_whoever_has_the_same_keys_is_the_same(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one reader has fetched is shown to no other one."""

    def of_secret(key: str, secret: str = "s") -> str:
        return find_source(S3Location(bucket="data", credentials=given(key, secret))).identity()

    assert of_secret("AKID") == of_secret("AKID", "rotated") != of_secret("OTHER")
    assert "AKID" not in of_secret("AKID")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    source = find_source(CHAIN)
    assert (source.keys().access_key_id, source.keys().session_token) == ("AKID", None)
    assert source.identity() == of_secret("AKID")


@promise("S-205")
def test_keys_that_renew_themselves_are_one_readers(empty_home: Path) -> None:
    expiring_keys(empty_home)
    first, second = find_source(CHAIN), find_source(CHAIN)
    assert first.keys() != first.keys()
    assert first.keys().access_key_id != second.keys().access_key_id
    assert first.identity() == second.identity()
