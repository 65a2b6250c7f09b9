"""What a new server of a live mount goes on with (docs/SEMANTICS.md, The mount, S-41, S-58)."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from typing import Any

import pytest

from datastore.fuse.ops import Fh, Ino, OpenRequest
from datastore.fuse.state.removed import RemovedFiles
from datastore.fuse.vfs.change.renames import NOREPLACE
from datastore.fuse.vfs.upload import copies
from tests.driving import resolve
from tests.faulty import Plan, from_nth, no_faults
from tests.kernelkeeps import Room


from tests.localfs import ME, LocalFs
