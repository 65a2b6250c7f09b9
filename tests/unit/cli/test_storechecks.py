"""What `doctor` finds of a bucket that keeps some rights or conditions to itself; real servers: tests/e2e."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from datastore.api.source import S3Location, StaticCredentials
from datastore.cli.exitcodes import ExitCode
from datastore.cli.findings import Finding, Level
from datastore.cli.storechecks import store_checks
from datastore.secret import Secret
from tests.hostile.servers import DATE, ETAG, Attack, Talk, hostile, listing, refusal

KEYS = StaticCredentials(access_key_id="k", secret_access_key=Secret("s"))


def bucket(*, refused: str = "", ignored: Collection[bytes] = ()) -> Attack:
    """An empty bucket. refused: a method that these keys may not use. ignored: conditions of a PUT."""

    def attack(talk: Talk) -> None:
        head = talk.head.lower()
        conditions = [name for name in (b"if-none-match", b"if-match") if b"\r\n%b:" % name in head]
        if talk.is_listing:
            talk.answer(200, listing())
        elif b"object-lock" in talk.target:
            talk.answer(404, refusal("ObjectLockConfigurationNotFoundError", "none"))
        elif talk.method == refused.encode():
            talk.answer(403, refusal("AccessDenied", "no"))
        elif conditions and not set(conditions) <= set(ignored):
            talk.answer(412, refusal("PreconditionFailed", "no"))
        else:
            talk.answer(200, b"", f'ETag: "{ETAG}"', f"Last-Modified: {DATE}")

    return attack


def found(attack: Attack, *, conflict_fails: bool = False) -> tuple[list[Finding], list[bytes]]:
    """The findings of a writable Datastore in this bucket, and the methods of the requests that came."""
    with hostile(attack) as server:
        location = S3Location(bucket="data", endpoint=server.endpoint, force_path_style=True, credentials=KEYS)
        seen = list(store_checks("work", location, read_only=False, conflict_fails=conflict_fails))
        return seen, [head.split(b" ", 1)[0] for head in server.heads]


def test_a_healthy_bucket_is_left_as_it_was() -> None:
    seen, methods = found(bucket())
    assert [each.level for each in seen] == [Level.OK] * 4, seen
    assert (methods.count(b"PUT"), methods.count(b"DELETE")) == (3, 1)


@pytest.mark.parametrize(("refused", "action"), [("PUT", "put"), ("HEAD", "head"), ("DELETE", "delete")])
def test_the_request_that_is_refused_is_named_and_the_object_removed(refused: str, action: str) -> None:
    seen, methods = found(bucket(refused=refused))
    (bad,) = [each for each in seen if each.level is Level.FAIL]
    assert bad.text.startswith(f"{action} .datastore-doctor-")
    assert bad.code is ExitCode.ACCESS
    assert ("left in the bucket" in bad.text) is (refused == "DELETE")
    assert (b"DELETE" in methods) is (refused != "PUT")


@pytest.mark.parametrize("conflict_fails", [False, True])
def test_a_server_that_ignores_conditions_is_named(conflict_fails: bool) -> None:
    seen, _ = found(bucket(ignored=(b"if-match", b"if-none-match")), conflict_fails=conflict_fails)
    (told,) = [each for each in seen if each.level is not Level.OK]
    assert "does not honour If-None-Match and If-Match of a PUT" in told.text
    assert "the last close wins" in told.text
    assert (told.level is Level.FAIL, "conflict: fail" in told.text) == (conflict_fails, conflict_fails)
    seen, _ = found(bucket(ignored=(b"if-match",)))
    assert "does not honour If-Match of a PUT" in next(each.text for each in seen if each.level is Level.WARN)
