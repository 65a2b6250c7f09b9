"""Several saves of one model at once, each with a client of its own: `python -m tests.contract.savers HOME COUNT NAME`.

HOME is a directory, or a server's endpoint, keys and the suffix of its buckets as JSON. Waits for a line on standard
input before it begins, and prints the numbers that it got, one a line.
"""

from __future__ import annotations

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from datastore.fuse.store.s3 import open_s3
from datastore.models.directory import DirectoryTree
from datastore.models.progress import Progress
from datastore.models.saving import save
from tests.contract.conftest import location_of
from tests.modelstores import Home, wish
from tests.servers import Server


def main() -> None:
    """See above."""
    where, count, name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if where.startswith("{"):
        said = json.loads(where)
        server, suffix = Server(**said["server"]), said["suffix"]
        home = Home(server.name, stores=lambda bucket: open_s3(location_of(server, f"{bucket}{suffix}")), suffix=suffix)
    else:
        home = Home("directory", root=Path(where))
    with tempfile.TemporaryDirectory() as root:
        Path(root, "f").write_text(name)
        models = [home.models() for _ in range(count)]
        sys.stdin.readline()
        with ThreadPoolExecutor(count) as pool:
            made = [pool.submit(save, each, DirectoryTree(root), wish(force=True), Progress()) for each in models]
            numbers = [each.result().manifest.version for each in made]
    home.close()
    sys.stdout.write("\n".join(map(str, numbers)) + "\n")


if __name__ == "__main__":
    main()
