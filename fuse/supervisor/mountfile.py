"""mount.json: what a mount tells others in its state directory, without a secret. Replaced whole."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from datastore.controlclient import MOUNT_FILE
from datastore.logs import fields

log = logging.getLogger(__name__)


class MountFile:
    """trouble: why the file is older than what was to be written last, such as a full disk; '' when it is not."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / MOUNT_FILE
        self.trouble = ""

    def write(self, described: Mapping[str, object]) -> None:
        """Never fails: `trouble` tells."""
        temporary = self._path.with_name(MOUNT_FILE + ".new")
        try:
            temporary.write_text(json.dumps(described, indent=1))
            temporary.chmod(0o600)
            temporary.replace(self._path)
            self.trouble = ""
        except OSError as error:
            if not self.trouble:
                log.error("mount.json can't be written; it is tried again", extra=fields(error=error))
            self.trouble = error.strerror or str(error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def remove(self) -> None:
        """Idempotent."""
        self._path.unlink(missing_ok=True)
