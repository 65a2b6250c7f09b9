"""`datastore model tag --cluster`: what may change of a Model while its alias is moved, and what may not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from datastore.api.resources import VERSIONS, Resource
from datastore.cli.model import oncluster
from datastore.errors import Unreachable
from datastore.kubeclient import Conflict
from datastore.models.errors import ModelError
from datastore.models.names import Reference
from datastore.models.progress import Progress
from tests.promises import promise


class Api:
    """An API server with a Model of two versions. meanwhile: what somebody does to it before the next change of ours
    comes."""

    namespace = "team"

    def __init__(self, meanwhile: Callable[[dict[str, Any]], None]) -> None:
        self.model: dict[str, Any] = {
            "metadata": {"name": "digits", "uid": "u", "generation": 1, "resourceVersion": "1"},
            "spec": {},
            "status": {"latestVersion": 2, "aliases": [{"name": "prod", "version": 1}]},
        }
        self.meanwhile: Callable[[dict[str, Any]], None] | None = meanwhile

    def get(self, _: Resource, name: str) -> dict[str, Any]:
        assert name == "digits"
        return copy.deepcopy(self.model)

    def patch(self, _: Resource, name: str, change: Mapping[str, Any]) -> None:
        assert name == "digits"
        if self.meanwhile is not None:
            self.meanwhile(self.model)
            self.model["metadata"]["resourceVersion"] = "2"
            self.meanwhile = None
        if change["metadata"]["resourceVersion"] != self.model["metadata"]["resourceVersion"]:
            raise Conflict("the object has been modified")
        self.model["spec"] = change["spec"]


def tag(api: Api, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(oncluster, "of_context", lambda *_: api)
    oncluster.tag_on_cluster(Reference("digits", version=2), "prod", "team", 1, remove=False, wait=False)
    return api.model["spec"]["aliases"]


@promise("S-403")
def test_a_concurrent_status_update_does_not_refuse_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def writes(model: dict[str, Any]) -> None:
        model["status"]["conditions"] = [{"type": "StoreUpdated", "status": "True"}]

    assert tag(Api(writes), monkeypatch) == [{"name": "prod", "version": 2}]


@promise("S-403")
@pytest.mark.parametrize("what", ["spec", "status", "another"])
def test_a_concurrent_change_of_the_model_is_not_undone(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changes(model: dict[str, Any]) -> None:
        if what == "spec":
            model["metadata"]["generation"] = 2
        elif what == "status":
            model["status"]["aliases"] = [{"name": "prod", "version": 2}]
        else:
            model["metadata"]["uid"] = "another"

    with pytest.raises(Conflict):
        tag(Api(changes), monkeypatch)


@promise("S-403")
def test_an_alias_that_can_not_be_moved_does_not_stay_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its Job would fail for ever, and later changes of other aliases with it."""
    told = {"type": "StoreUpdated", "status": "False", "reason": "ModelNotFound", "message": "digits has no version 2"}
    listed = [{"name": "canary", "version": 1}, {"name": "prod", "version": 1}]
    api = Api(lambda model: model["status"].update(conditions=[{**told, "observedGeneration": 1}]))
    api.model["spec"]["aliases"] = listed
    monkeypatch.setattr(oncluster, "of_context", lambda *_: api)
    with pytest.raises(ModelError, match="the alias prod of digits was not moved to 2: digits has no version 2"):
        oncluster.tag_on_cluster(Reference("digits", version=2), "prod", "team", None, remove=False, wait=True)
    assert api.model["spec"]["aliases"] == listed


@promise("S-365")
def test_work_is_followed_over_an_outage_of_the_api_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: list[Any] = [Unreachable("no answer"), Unreachable("no answer"), {"status": {"phase": "Ready"}}]

    class Away:
        def get(self, _: Resource, name: str) -> dict[str, Any]:
            assert name == "digits-1"
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return dict(answer)

    monkeypatch.setattr(oncluster.time, "sleep", lambda _: None)  # type: ignore[attr-defined]
    client: Any = Away()
    status = oncluster._followed(client, "ModelVersion", VERSIONS, "digits-1", Progress())
    assert status == {"phase": "Ready"}
    assert capsys.readouterr().err.count("no answer; the work continues") == 1
