"""The command as a process of its own, over the fake mount server: `python driver.py VERB ...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from datastore.cli.main import main
from datastore.mounting import launch, mountserver

FAKE = Path(__file__).with_name("fake_server.py")

launch.command = lambda: [sys.executable, str(FAKE), "datastore.fuse"]
mountserver.READY_TIMEOUT_S = 60.0
mountserver.STOP_TIMEOUT_S = 0.5 if os.environ.get("FAKE_MODE") == "silent" else 60.0
main()
