"""versitygw with users of its own, whose keys can be added and removed."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers import Server, find_tool, run_versitygw


class Accounts:
    """Users of one versitygw, each with a key."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def admin(self, *arguments: str) -> None:
        login = ["--access", self.server.access_key, "--secret", self.server.secret_key]
        command = [find_tool("versitygw"), "admin", *login, "--endpoint-url", self.server.endpoint, *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=100)

    def create(self, name: str, secret: str, role: str = "admin") -> dict[str, str]:
        """Add a user. role: a 'user' may do what the policies of buckets allow."""
        self.admin("create-user", "--access", name, "--secret", secret, "--role", role)
        return {"AWS_ACCESS_KEY_ID": name, "AWS_SECRET_ACCESS_KEY": secret}

    def remove(self, name: str) -> None:
        self.admin("delete-user", "--access", name)


@contextmanager
def run_accounts() -> Iterator[Accounts]:
    """Yield a server with no users but its own."""
    with (
        tempfile.TemporaryDirectory(prefix="datastore-iam-") as users,
        run_versitygw("--iam-dir", users, "--iam-cache-disable") as server,
    ):
        yield Accounts(server)
