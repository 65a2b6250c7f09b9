"""The inputs of W12's programs, made on local disk before anything is timed. They are the same in every run."""

from __future__ import annotations

import random
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

SEED = 12
WHEEL_FILES = 2000
TAR_FILES = 5000
TAR_FILES_PER_FOLDER = 100
COMMITS = 40
FILES_PER_COMMIT = 20
GIT_IDENTITY = ("-c", "user.name=Bench", "-c", "user.email=bench@example.org", "-c", "commit.gpgsign=false")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where the inputs are."""

    wheel: Path
    repository: Path
    tarball: Path


def make_inputs(folder: Path) -> Inputs:
    """Make all inputs in an existing folder."""
    random_source = random.Random(SEED)
    return Inputs(
        wheel=_make_wheel(folder, random_source),
        repository=_make_repository(folder / "repository", random_source),
        tarball=_make_tarball(folder / "files.tar", random_source),
    )


def _some_text(random_source: random.Random, size: int) -> bytes:
    return random_source.randbytes(size // 2).hex().encode()


def _make_wheel(folder: Path, random_source: random.Random) -> Path:
    """A valid wheel with WHEEL_FILES modules in 20 packages."""
    wheel = folder / "manyfiles-1.0-py3-none-any.whl"
    info = "manyfiles-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        names = [f"manyfiles/part{number % 20:02}/module{number:04}.py" for number in range(WHEEL_FILES)]
        for name in names:
            archive.writestr(name, b"# " + _some_text(random_source, random_source.randrange(200, 8000)) + b"\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: manyfiles\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: bench\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        recorded = [*names, f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD"]
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in recorded))
    return wheel


def _make_repository(repository: Path, random_source: random.Random) -> Path:
    """COMMITS commits, each of which adds and changes FILES_PER_COMMIT files; tag `half` is in the middle."""
    git = ["git", *GIT_IDENTITY, "-C", str(repository)]
    repository.mkdir()
    subprocess.run([*git, "init", "--quiet", "--initial-branch=main"], check=True)
    for commit in range(COMMITS):
        for number in range(FILES_PER_COMMIT):
            # Half of the names are those of the commit before.
            path = repository / f"folder{number % 5}" / f"file{commit * FILES_PER_COMMIT // 2 + number}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(_some_text(random_source, 2000))
        subprocess.run([*git, "add", "--all"], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", f"commit {commit}"], check=True)
        if commit == COMMITS // 2:
            subprocess.run([*git, "tag", "half"], check=True)
    return repository


def _make_tarball(tarball: Path, random_source: random.Random) -> Path:
    """TAR_FILES files of 1 to 8 KiB, in folders of a hundred, with one link in each folder."""
    with tarfile.open(tarball, "w") as archive:
        for number in range(TAR_FILES):
            folder = f"files/folder{number // TAR_FILES_PER_FOLDER:02}"
            body = random_source.randbytes(random_source.randrange(1024, 8192))
            member = tarfile.TarInfo(f"{folder}/file{number:04}")
            member.size = len(body)
            archive.addfile(member, BytesIO(body))
            if number % TAR_FILES_PER_FOLDER == 0:
                link = tarfile.TarInfo(f"{folder}/first")
                link.type, link.linkname = tarfile.SYMTYPE, f"file{number:04}"
                archive.addfile(link)
    return tarball
