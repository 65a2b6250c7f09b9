"""datastore.csi.plugin: the background tasks continue after a round that failed."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from datastore.csi import plugin
from datastore.csi.settings import Settings


def test_a_pod_that_vanishes_during_a_round_ends_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "LOGS_S", 0.01)
    made = plugin.Plugin(Settings(node_id="n", plugin_dir=tmp_path / "plugins" / "p"), "1", None, None)
    again, rounds = threading.Event(), 0

    def look() -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise FileNotFoundError("pods/uid/volumes")
        again.set()

    monkeypatch.setattr(made._volumes.pod_logs, "look", look)

    async def story() -> None:
        task = asyncio.create_task(made._write_logs())
        while not again.is_set() and not task.done():
            await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()

    asyncio.run(story())
    made._volumes.pod_logs.close()
