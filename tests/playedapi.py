"""A fake Kubernetes API server: objects by their path over real HTTP, so that tests use the official client."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.authority import Identity

Object = dict[str, Any]


class PlayedApi:
    """objects: by path. refused: status and message by a path's beginning. asked: method, target, body of requests."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.authorization = ""
        self.page = 500
        self.url = ""

    def answer(self, method: str, target: str, body: Any) -> tuple[int, Object]:
        parts = urlsplit(target)
        path, query = parts.path, parse_qs(parts.query)
        self.asked.append((method, target, body))
        for start, (status, message) in self.refused.items():
            if path.startswith(start):
                return status, {"kind": "Status", "message": message}
        if method == "PATCH" and isinstance(body, dict):  # a JSON patch, which is a list, is only recorded
            self.objects[path] = merged(self.objects[path], body)
        if path in self.objects:
            return 200, self.objects[path]
        found = [one for where, one in self.objects.items() if where.rpartition("/")[0] == path]
        if not found and path.rpartition("/")[0].endswith(("s", "s/")):
            return 404, {"kind": "Status", "message": f"{path} not found"}
        first = int(query.get("continue", ["0"])[0])
        rest = {"continue": str(first + self.page)} if len(found) > first + self.page else {}
        return 200, {"items": found[first : first + self.page], "metadata": rest}

    def kubeconfig(
        self, directory: Path, namespace: str = "team", *, trust: Mapping[str, Any] = MappingProxyType({}), **user: Any
    ) -> Path:
        """Write a kubeconfig for this server and return its path. trust: what the cluster's entry says of TLS."""
        document = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url, **trust}}],
            "users": [{"name": "u", "user": user or {"token": "of-the-user"}}],
        }
        path = directory / "kubeconfig"
        path.write_text(yaml.safe_dump(document))
        return path


def merged(present: Any, change: Any) -> Any:
    """Return `present` after a merge patch (RFC 7396)."""
    if not isinstance(change, dict) or not isinstance(present, dict):
        return change
    both = {**present, **{name: merged(present.get(name, {}), value) for name, value in change.items()}}
    return {name: value for name, value in both.items() if value is not None}


@contextmanager
def played_api(identity: Identity | None = None) -> Iterator[PlayedApi]:
    """Run the server on a port of its own, over TLS if it has an identity."""
    api = PlayedApi()

    class Page(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            api.authorization = self.headers.get("Authorization", "")
            status, document = api.answer(self.command, self.path, body)
            content = document["text"].encode() if "text" in document else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PATCH = do_POST = answer  # noqa: N815  (the names of the base class)

        def log_message(self, *_: object) -> None:
            """Log nothing: tests look at `asked`."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    server.daemon_threads = True
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    if identity is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(identity.certificate, identity.key)
        server.socket = tls.wrap_socket(server.socket, server_side=True)
        api.url = api.url.replace("http", "https")
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
