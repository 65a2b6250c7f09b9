"""datastore.controller.trainingjobs.reconciler: what it says of a TrainingJob that it does not run."""

from __future__ import annotations

import asyncio
from typing import Any

from datastore.controller.runtime.client import Client
from datastore.controller.runtime.conditions import Event
from datastore.controller.runtime.recorder import Recorder
from datastore.controller.trainingjobs.informers import Informers
from datastore.controller.trainingjobs.reconciler import Reconciler
from datastore.controller.trainingjobs.settings import Settings
from tests.promises import promise

KEY = ("team", "mnist")


class ToldClient(Client):
    """An API server that takes a status, and nothing else."""

    async def apply(self, body: Any, subresource: str = "") -> dict[str, Any]:
        assert subresource == "status"
        return {**JOB, **body}


class Silent(Recorder):
    async def record(self, body: Any, event: Event) -> None:
        pass


JOB: dict[str, Any] = {
    "apiVersion": "datastore.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "mnist", "namespace": "team", "uid": "u-1", "generation": 1},
    "spec": {
        "framework": "none",
        "image": "registry/train:1",
        "command": ["train"],
        "datastores": [{"name": "out", "path": "/out"}],
        "save": {"model": "digits", "from": "/out/export"},
    },
}


def status_of(*, saves_models: bool) -> dict[str, Any]:
    settings, client = Settings(identity="c", saves_models=saves_models), ToldClient()
    informers = Informers(lambda _: None, saves_models=saves_models)
    informers.trainingjobs.put(JOB)
    asyncio.run(Reconciler(client, Silent(client, "c"), informers, settings).reconcile(KEY))
    status: dict[str, Any] = (informers.trainingjobs.get(KEY) or {})["status"]
    return status


@promise("S-355")
def test_a_save_is_refused_clearly_where_no_models_are_kept() -> None:
    found = status_of(saves_models=False)
    assert found["phase"] == "Failed"
    assert "spec.save: this cluster saves no Models (the component models is not installed)" in found["message"]
    assert status_of(saves_models=True)["message"] == "waits: Datastore out is not there"
