"""A mount server that mounts nothing: the protocol of `python -m datastore.fuse`, for the tests of the command.

FAKE_MODE says how it behaves (MODES below). It keeps the operations it was asked for in <state dir>/asked, one a line.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

MODES = (
    "ready", "error", "silent", "late", "garbage", "dies", "unsynced", "busy", "mute", "held", "refused", "stalled",
    "ending", "vanishes",
)  # fmt: skip
PATIENCE_S = 300.0
"""Nobody is there any more: a test that failed must not leave us behind."""


def main() -> None:
    mode = os.environ.get("FAKE_MODE", "ready")
    spec = json.loads(sys.stdin.read())
    state_dir = Path(spec["state_dir"])
    (state_dir / "fake.pid").write_text(str(os.getpid()))
    if mode == "error":
        say({"error": os.environ["FAKE_ERROR"], "kind": os.environ["FAKE_KIND"]})
    elif mode == "silent":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(PATIENCE_S)
    elif mode == "late":
        # Ready just when it is asked to stop: the command must notice.
        signal.sigwait({signal.SIGTERM})
        serve(mode, spec, state_dir)
    elif mode == "garbage":
        sys.stdout.write("hello\n")
    elif mode == "dies":
        sys.stderr.write("first\nno space left on the moon\n")
        sys.exit(3)
    else:
        serve(mode, spec, state_dir)


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve(mode: str, spec: dict[str, Any], state_dir: Path) -> None:
    source = spec["source"]
    source.pop("credentials", None)
    spec["location"] = f"s3://{source['bucket']}/{source.get('prefix', '')}"
    pids = {"supervisorPid": os.getpid(), "serverPid": os.getpid()}
    (state_dir / "mount.json").write_text(json.dumps({**spec, **pids}))
    with socket.socket(socket.AF_UNIX) as listener:
        (state_dir / "control.sock").unlink(missing_ok=True)
        directory = os.open(state_dir, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{directory}/control.sock")
        listener.listen()
        listener.settimeout(PATIENCE_S)
        say({"ready": True, **pids, "mountpoint": spec["mountpoint"]})
        while answer_one(mode, spec, state_dir, listener):
            pass
    for name in ("mount.json", "control.sock"):
        (state_dir / name).unlink(missing_ok=True)


def answer_one(mode: str, spec: dict[str, Any], state_dir: Path, listener: socket.socket) -> bool:
    """Serve one connection; False when it was the last."""
    client, _ = listener.accept()
    with client, client.makefile("rwb") as stream:
        request = json.loads(stream.readline())
        with (state_dir / "asked").open("a") as asked:
            asked.write(json.dumps(request) + "\n")
        if mode == "mute":
            time.sleep(PATIENCE_S)
        if request["op"] == "stop" and mode == "vanishes":
            return False
        if request["op"] == "stop" and (mode == "held" or (mode in ("stalled", "ending") and not request["force"])):
            stream.read()  # until the command gives up
            return True
        going_on = True
        for answer in answers(mode, spec, request):
            stream.write(json.dumps(answer).encode() + b"\n")
            going_on = going_on and answer.get("gone") is not True
        return going_on


def answers(mode: str, spec: dict[str, Any], request: dict[str, Any]) -> list[dict[str, Any]]:
    operation = request["op"]
    dirty = [{"path": "a/b.txt", "bytes": 2048, "since": time.time() - 60, "error": "403 AccessDenied"}]
    dirty[0]["stuck"] = "FAKE_STUCK" in os.environ
    if operation == "status":
        told = {"ok": True, "name": spec["name"], "cache": {"bytes": 1536, "limit": 10 << 30}, "path": {"read": "fast"}}
        told["unsent"] = {"files": 0, "bytes": 0, "failed": 0, "error": ""}
        if mode in ("held", "refused", "vanishes"):
            told["inMemory"] = 2048
        if mode in ("refused", "vanishes"):
            told["unsent"]["error"] = dirty[0]["error"]
        if mode in ("held", "stalled", "ending"):
            told["storage"] = json.loads(os.environ["FAKE_STORAGE"])
            told["detached"] = mode == "ending"
        return [{**told, "dirty": dirty if mode in ("unsynced", "held", "refused", "stalled", "vanishes") else []}]
    if operation == "warm":
        steps = [{"done_files": n, "files": 3, "done_bytes": n * 1024, "bytes": 3072} for n in range(1, 4)]
        failed = {"ok": False, "errors": ["a.txt: 403 AccessDenied", "b.txt: 403 AccessDenied"]}
        return [*({"progress": step} for step in steps), failed if mode == "unsynced" else {"ok": True}]
    if operation == "discard" and mode == "stalled":
        return [{"ok": False, "late": True, "errors": ["discard took longer than 5 s"]}]
    if operation == "flush" and mode == "unsynced":
        return [{"ok": False, "errors": ["a/b.txt: 403 AccessDenied"]}]
    if operation == "stop" and mode == "busy" and request["detach"]:
        return [{"ok": True, "errors": [], "detached": "sh (pid 7) uses it"}]
    if operation == "stop" and not request["force"]:
        if mode in ("unsynced", "refused"):
            return [{"ok": False, "errors": ["a/b.txt: 403 AccessDenied"]}]
        if mode == "busy":
            return [{"ok": False, "errors": ["sh (pid 7) uses it"]}]
    errors = ["a/b.txt: 403 AccessDenied"] if mode in ("unsynced", "refused") else []
    lost = 2048 if mode == "refused" else 0
    return [{"ok": True, "errors": errors, "inMemory": lost, "gone": operation == "stop"}]


if __name__ == "__main__":
    main()
