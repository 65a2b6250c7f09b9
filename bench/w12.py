"""W12: real programs on a mount, on local disk and, where it is installed, on s3fs. `python -m bench.w12 [PART ...]`.

The subjects are measured one after the other, each with its own versitygw and its own empty directory. The bar (goal)
is that every part succeeds on our mount; the times are only shown. Without PART the table is also written to
bench/results/w12.md.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.w12_inputs import TAR_FILES, TAR_FILES_PER_FOLDER, WHEEL_FILES, Inputs, make_inputs
from tests.servers import Server, make_bucket, run_versitygw
from tests.tools.mounting import mounted

RESULTS = Path(__file__).resolve().parent / "results"
PROGRAMS = Path(__file__).resolve().parent / "programs"
PART_TIMEOUT_S = 600.0
SUBJECTS = ("ours", "local", "s3fs")


class Failed(Exception):
    """A part did not do what it should; the text says what happened."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Two directories that show the same files: two mounts of one bucket, or the same directory twice."""

    first: Path
    second: Path


@dataclass(frozen=True, slots=True)
class Measured:
    """The seconds that a part took, or why it failed."""

    seconds: float = 0.0
    error: str = ""


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a program and return its standard output. Errors: Failed."""
    words = [str(word) for word in command]
    quiet = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    try:
        done = subprocess.run(
            words, cwd=cwd, env=quiet, capture_output=True, text=True, timeout=PART_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{words[0]} did not end within {PART_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["said nothing"]
        raise Failed(f"{Path(words[0]).name}: exit code {done.returncode}: {lines[-1]}")
    return done.stdout


def expect(found: object, wanted: object, what: str) -> None:
    """Compare two values. Errors: Failed when they differ."""
    if found != wanted:
        raise Failed(f"{what}: {found!r} where {wanted!r} was expected")


def timed(work: Callable[[], object]) -> float:
    """Run `work` and return how many seconds it took."""
    started = time.monotonic()
    work()
    return time.monotonic() - started


def pip_install(subject: Subject, inputs: Inputs) -> float:
    """Install a wheel with 2,000 files and import from it."""
    target = subject.first / "site"
    options = ("--quiet", "--no-deps", "--no-index", "--no-compile", "--target", target)
    seconds = timed(lambda: run(sys.executable, "-m", "pip", "install", *options, inputs.wheel))
    expect(sum(1 for _ in (target / "manyfiles").rglob("*.py")), WHEEL_FILES, "installed files")
    run(sys.executable, "-c", "import manyfiles.part00.module0000", cwd=target)
    return seconds


def git_clone_and_checkout(subject: Subject, inputs: Inputs) -> float:
    """Clone, check out an old state and the new one again; git must find nothing wrong."""
    clone = subject.first / "clone"

    def work() -> None:
        run("git", "clone", "--quiet", "--no-local", inputs.repository, clone)
        run("git", "-C", clone, "checkout", "--quiet", "half")
        run("git", "-C", clone, "checkout", "--quiet", "main")

    seconds = timed(work)
    expect(run("git", "-C", clone, "status", "--porcelain"), "", "git status")
    run("git", "-C", clone, "fsck", "--strict")
    return seconds


def tar_extract(subject: Subject, inputs: Inputs) -> float:
    """Extract 5,000 files in folders with links; each must be as it was packed."""
    seconds = timed(lambda: run("tar", "--no-same-owner", "-xf", inputs.tarball, "-C", subject.first))
    found = sum(len(files) for _, _, files in os.walk(subject.first / "files"))
    expect(found, TAR_FILES + TAR_FILES // TAR_FILES_PER_FOLDER, "extracted files and links")
    with tarfile.open(inputs.tarball) as archive:
        for member in archive:
            packed = archive.extractfile(member) if member.isreg() else None
            if packed is not None and packed.read() != (subject.first / member.name).read_bytes():
                raise Failed(f"{member.name} is not what was packed")
    return seconds


def program(name: str) -> Callable[[Subject, Inputs], float]:
    """Return a part that runs a program of bench/programs, which prints how long it took."""

    def work(subject: Subject, inputs: Inputs) -> float:
        del inputs
        return float(run(sys.executable, PROGRAMS / name, subject.first).splitlines()[-1])

    return work


def tensorboard_tail(subject: Subject, inputs: Inputs) -> float:
    """Write through one mount, read through the other."""
    del inputs
    return float(run(sys.executable, PROGRAMS / "tensorboard_tail.py", subject.first, subject.second).splitlines()[-1])


PARTS: Mapping[str, Callable[[Subject, Inputs], float]] = {
    "pip install of a wheel with 2,000 files": pip_install,
    "git clone and two checkouts": git_clone_and_checkout,
    "tar x of 5,000 files": tar_extract,
    "SQLite, 1,000 rows with fsync each": program("sqlite_rows.py"),
    "safetensors, 64 MiB saved and loaded": program("safetensors_file.py"),
    "TensorFlow, 3 checkpoints of 16 MiB and a restore": program("tensorflow_checkpoint.py"),
    "TensorBoard tail through a second mount, 5 steps": tensorboard_tail,
}


@contextlib.contextmanager
def ours(server: Server, folder: Path) -> Iterator[Subject]:
    """Two mounts of one bucket, as two machines would have them."""
    with (
        mounted(server, "ours", folder / "a") as first,
        mounted(server, "ours", folder / "b") as second,
    ):
        yield Subject(first, second)


@contextlib.contextmanager
def local(server: Server, folder: Path) -> Iterator[Subject]:
    """A directory of the local disk."""
    del server
    directory = folder / "local"
    directory.mkdir()
    yield Subject(directory, directory)


@contextlib.contextmanager
def s3fs(server: Server, folder: Path) -> Iterator[Subject]:
    """Two s3fs mounts of one bucket."""
    bucket = make_bucket(server, "s3fs")
    keys = folder / "s3fs-keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{server.access_key}:{server.secret_key}\n")
    with contextlib.ExitStack() as stack:
        targets = []
        for name in ("s3fs-a", "s3fs-b"):
            target = folder / name
            target.mkdir()
            options = f"url={server.endpoint},use_path_request_style,passwd_file={keys}"
            run("s3fs", bucket, target, "-o", options)
            stack.callback(subprocess.run, ["fusermount3", "-u", "-z", str(target)], check=False)
            targets.append(target)
        yield Subject(*targets)


OPENERS = {"ours": ours, "local": local, "s3fs": s3fs}


def measure(name: str, parts: Sequence[str], inputs: Inputs) -> dict[str, Measured]:
    """Run the parts on one subject, with a server of its own."""
    results = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="w12-", ignore_cleanup_errors=True)))
        server = stack.enter_context(run_versitygw())
        subject = stack.enter_context(OPENERS[name](server, folder))
        for part in parts:
            print(f"[{name}] {part} ... ", end="", flush=True)
            try:
                results[part] = Measured(seconds=PARTS[part](subject, inputs))
                print(f"{results[part].seconds:.2f} s", flush=True)
            except (Failed, OSError) as error:
                results[part] = Measured(error=str(error))
                print(f"FAILED: {error}", flush=True)
    return results


def table(results: Mapping[str, Mapping[str, Measured]], parts: Sequence[str]) -> Iterator[str]:
    """Yield the Markdown table; a part's bar is that it succeeds on our mount."""
    subjects = [name for name in SUBJECTS if name in results]
    yield f"| W12, seconds | {' | '.join(subjects)} | bar: it succeeds |"
    yield f"|---|{'---|' * (len(subjects) + 1)}"
    for part in parts:
        cells = [
            f"failed: {cell.error}" if cell.error else f"{cell.seconds:.2f}"
            for cell in (results[name][part] for name in subjects)
        ]
        yield f"| {part} | {' | '.join(cells)} | {'missed' if results['ours'][part].error else 'met'} |"


def main(arguments: Sequence[str]) -> int:
    """Measure the parts whose names begin with an argument, or all; return the exit code."""
    parts = [
        part for part in PARTS if not arguments or any(part.lower().startswith(word.lower()) for word in arguments)
    ]
    subjects = [name for name in SUBJECTS if name != "s3fs" or shutil.which("s3fs")]
    if "s3fs" not in subjects:
        print("s3fs is not installed, so its column is missing (apt-get install s3fs)")
    loads = [f"{os.getloadavg()[0]:.1f}"]
    with tempfile.TemporaryDirectory(prefix="w12-inputs-") as folder:
        print("making the inputs", flush=True)
        inputs = make_inputs(Path(folder))
        results = {name: measure(name, parts, inputs) for name in subjects}
    loads.append(f"{os.getloadavg()[0]:.1f}")
    lines = list(table(results, parts))
    RESULTS.mkdir(exist_ok=True)
    about = (
        f"{os.cpu_count()} cores, kernel {platform.release()}, versitygw on the same machine, load {' to '.join(loads)}"
    )
    if not arguments:
        (RESULTS / "w12.md").write_text(
            "\n".join(("# W12", "", f"{time.strftime('%Y-%m-%d')}; {about}.", "", *lines, ""))
        )
    print("\n" + "\n".join(lines))
    missed = sum(1 for cell in results["ours"].values() if cell.error)
    print(f"{len(parts) - missed} met, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
