"""datastore.controller.datastores.prober: what one Datastore's check means for others of the same server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from datastore.api.status import Capabilities
from datastore.backends.base import Ensured
from datastore.backends.registry import BackendKind, Opening
from datastore.controller.datastores.effective import effective_spec
from datastore.controller.datastores.prober import BackendProber
from datastore.controller.datastores.settings import Settings
from datastore.errors import DatastoreError, DeadlineExceeded, ServerFault, Throttled, Unreachable
from tests.promises import promise
from tests.unit.controller.datastores.test_effective import OWN, body, nfs_class


class Failing:
    """A backend that fails for one Datastore."""

    def __init__(self, opening: Opening, error: DatastoreError) -> None:
        self._error = error if opening.identity.name == "broken" else None

    def ensure(self) -> Ensured:
        if self._error is not None:
            raise self._error
        return Ensured(source=None)

    def probe(self) -> Capabilities:
        return Capabilities.model_validate({})


@promise("S-288")
@pytest.mark.parametrize(
    ("error", "for_all"),
    [(Unreachable("x"), True), (DeadlineExceeded("x"), True), (ServerFault("x"), False), (Throttled("x"), False)],
)
def test_only_a_server_that_does_not_answer_counts_as_away_for_all_its_datastores(
    error: DatastoreError, for_all: bool
) -> None:
    """An answer is about one Datastore, whose name it may hold."""
    kind = BackendKind(
        name="nfs", volume="csi", open=lambda opening: cast(Any, Failing(opening, error)), server=lambda _: "nas"
    )
    wanted = replace(effective_spec(body(OWN), nfs_class(), Settings()), kind=kind, secret=None)

    async def looks() -> list[DatastoreError | None]:
        prober = BackendProber(cast(Any, None), Settings(), lambda: ())
        try:
            names = ("broken", "other")
            return [(await prober.look(replace(wanted, name=name), lambda: None, made=True)).error for name in names]
        finally:
            prober.close()

    assert asyncio.run(looks()) == [error, error if for_all else None]
