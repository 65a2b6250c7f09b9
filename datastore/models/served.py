"""`python -m datastore.models.served --store DIR NAME:VERSION` reads every byte of a version before it is served.

Each pod of a Serving runs it as an init container. The store is mounted read-only at DIR. The result is written to
--report, which the kubelet copies into the pod's status: the version and its digest as JSON, or what is damaged, with
the path and both digests. Exit codes: 0 when the version is as it was saved; DAMAGED; UNREADABLE for other errors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from datastore.errors import DatastoreError
from datastore.models.directory import DirectoryStorage
from datastore.models.errors import VersionDamaged
from datastore.models.names import parse_reference
from datastore.models.progress import Progress
from datastore.models.registry import Models
from datastore.models.verifying import first_of, verify

DAMAGED = 3
UNREADABLE = 4
REPORT = "/dev/termination-log"
REPORT_BYTES = 4000
"""The most bytes of a report; the kubelet keeps 4,096."""


def main(argv: Sequence[str] | None = None) -> int:
    """Verify, report, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m datastore.models.served")
    parser.add_argument("--store", required=True, metavar="DIR", help="where the store is mounted")
    parser.add_argument("--report", default=REPORT, metavar="FILE", help="where the result is written")
    parser.add_argument("reference", metavar="NAME:VERSION")
    given = parser.parse_args(argv)
    code, text = _verified(given.store, given.reference)
    Path(given.report).write_bytes(text.encode("utf-8", "replace")[:REPORT_BYTES])
    sys.stderr.write(f"{text}\n")
    return code


def _verified(store: str, text: str) -> tuple[int, str]:
    """Return the exit code and the text to report."""
    try:
        reference = parse_reference(text)
        models = Models(DirectoryStorage(store), who="serving")
        manifest, damages = verify(models, reference.model, models.resolve(reference), Progress())
    except VersionDamaged as error:
        return DAMAGED, str(error).replace(f"{store}/", "")
    except (DatastoreError, OSError) as error:
        return UNREADABLE, str(error).replace(f"{store}/", "")
    if damages:
        return DAMAGED, first_of(damages).replace(f"{store}/", "")
    return 0, json.dumps({"version": manifest.version, "digest": manifest.digest})


if __name__ == "__main__":
    sys.exit(main())
