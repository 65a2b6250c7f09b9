"""datastore.controller.runtime.process: the options that the controllers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from datastore.controller.__main__ import main as datastores
from datastore.controller.models.__main__ import main as models
from datastore.controller.runtime import process
from datastore.controller.runtime.settings import RuntimeSettings
from datastore.controller.servings.__main__ import main as servings
from tests.promises import promise


@promise("S-114")
@pytest.mark.parametrize("main", [datastores, servings, models])
def test_every_controller_takes_its_namespaces_and_name_from_the_command_line_and_the_environment(
    monkeypatch: pytest.MonkeyPatch, main: Callable[[list[str]], None]
) -> None:
    found: list[RuntimeSettings] = []

    def run(settings: RuntimeSettings, name: str, kind: Any, *, verbose: bool) -> None:
        assert name.startswith("datastore-")
        found.append(settings)

    monkeypatch.setattr(process, "run", run)
    monkeypatch.setenv("POD_NAME", "c-1")
    monkeypatch.setenv("POD_NAMESPACE", "ours")
    monkeypatch.setenv("NAMESPACES", "a, b")
    main(["--workers", "3"])
    main(["--namespace", "c"])
    monkeypatch.setenv("NAMESPACES", "")
    main([])
    assert [each.watched_namespaces for each in found] == [("a", "b", "ours"), ("c", "ours"), ()]
    assert [[each.serves(name) for name in ("c", "ours", "d")] for each in found] == [
        [False, True, False],
        [True, True, False],
        [True] * 3,
    ]
    assert [(each.identity, each.namespace) for each in found] == [("c-1", "ours")] * 3
    assert found[0].workers == 3
