"""datastore.csi.plugin: the background tasks continue after a round that failed."""

from __future__ import annotations

import asyncio
import threading

from datastore.csi.plugin import every
from tests.patience import PATIENCE_S


def test_a_pod_that_vanishes_during_a_round_ends_no_task() -> None:
    again, rounds = threading.Event(), 0

    def look() -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 1:
            raise FileNotFoundError("pods/uid/volumes")
        again.set()

    async def story() -> None:
        task = asyncio.create_task(every(0.0, look))
        assert await asyncio.to_thread(again.wait, PATIENCE_S)
        assert not task.done()
        task.cancel()

    asyncio.run(story())
