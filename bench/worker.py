"""Runs a cell's work in a separate process, so that a mount that hangs can't hang the bench: `python -m bench.worker`.

A job comes as JSON on standard input, {"work": NAME, "arguments": {...}}; the answer goes as JSON to standard output:
figures, or {"error": TEXT}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.payload import WrongContent

ROOT = Path(__file__).resolve().parents[1]
KILL_WAIT_S = 10.0


class WorkFailed(Exception):
    """The work failed or did not end in time; the text says why."""


def run_work(work: str, timeout_s: float, **arguments: Any) -> dict[str, float]:
    """Run `module.function` of bench in a process. Errors: WorkFailed, also after timeout_s seconds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.worker"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    job = json.dumps({"work": work, "arguments": arguments})
    try:
        out, err = process.communicate(job, timeout=timeout_s)
    except BaseException as error:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=KILL_WAIT_S)
        if isinstance(error, subprocess.TimeoutExpired):
            raise WorkFailed(f"no end within {timeout_s:.0f} s") from error
        raise
    if process.returncode != 0:
        lines = err.strip().splitlines() or ["said nothing"]
        raise WorkFailed(f"exit code {process.returncode}: {lines[-1]}")
    answer: dict[str, Any] = json.loads(out)
    if "error" in answer:
        raise WorkFailed(str(answer["error"]))
    return answer


def main() -> None:
    """Read the job, run it and write the answer."""
    job = json.load(sys.stdin)
    module, _, function = job["work"].partition(".")
    work = getattr(importlib.import_module(f"bench.{module}"), function)
    try:
        answer = work(**job["arguments"])
    except OSError as error:
        answer = {"error": error.strerror or str(error)}
    except WrongContent as error:
        answer = {"error": f"wrong content: {error}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
