"""Builds the project's image from its Dockerfile, on a base made of Debian packages: `python -m tests.cluster.image`.

buildah works as root without a daemon. Its storage, the base and the archives are in the tools folder; an archive is
named by the hash of everything that went into it, so an unchanged image is not built again.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.layout import REPOSITORY, locked
from tests.servers import tools_dir

IMAGE = "localhost/kube-datastore:latest"
"""As manifests/ name it."""
BASE = "localhost/python:3.11-slim"
"""Stands for the public image of that name: Debian's Python on a minimal system."""
BASE_PACKAGES = "apt,python3,python3-venv,ca-certificates,libseccomp2,libstdc++6,mount"
LEFT_OUT = ("doc", "man", "info", "locale", "lintian", "bash-completion")
CONTEXT = (".ci/requirements-image.lock", "pyproject.toml", "README.md", "datastore", "fuse", "csi", "manifests")
"""What .dockerignore lets through."""
TRAIN_IMAGE = "localhost/digits-train:latest"
"""As docs/QUICKSTART.md names what its Job runs in."""
STEP_TIMEOUT_S = 900.0
ARCHIVES_KEPT = 6
"""Of each image: several checkouts may share the folder."""
HOST_FILES = ("/etc/ssl/certs", "/etc/pip.conf", "/etc/apt/apt.conf.d")
"""Lent to the build: how pip and apt-get reach the packages from this machine."""


class ImageError(Exception):
    """What could not be built, and what the builder said."""


def obstacle() -> str:
    """Why no image can be built here, or ''."""
    if os.getuid() != 0:
        return "building the image needs root"
    missing = [name for name in ("buildah", "mmdebstrap") if not shutil.which(name)]
    return f"{', '.join(missing)} missing (make cluster-tools installs them)" if missing else ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """An image: its name, the folder of its Dockerfile, what of it goes in, and how its archives are called."""

    image: str
    folder: Path
    context: tuple[str, ...]
    archive: str
    dockerfile: str = "Dockerfile"


PROJECT = Recipe(IMAGE, REPOSITORY, CONTEXT, "datastore")
SERVER = Recipe(
    "localhost/digits-server:latest",
    REPOSITORY / "examples" / "serving",
    ("requirements.txt", "digits.proto", "server.py", "client.py"),
    "server",
)
GANESHA = Recipe(
    "localhost/datastore-ganesha:latest",
    REPOSITORY,
    ("datastore/backends/nfs/ganeshapod.py",),
    "ganesha",
    "manifests/managed-nfs/Dockerfile",
)
TRAINER = Recipe(TRAIN_IMAGE, REPOSITORY / "examples" / "digits", ("requirements.txt",), "train")


def image_archive(recipe: Recipe = PROJECT) -> Path:
    """The image as a docker archive, built if there is none of these sources. Errors: ImageError."""
    folder = tools_dir().parent / "images"
    with locked(folder / "lock"):
        archive = folder / f"{recipe.archive}-{_hash_of(_context_files(recipe), _base_key(), recipe.image)[:16]}.tar"
        if archive.exists():
            archive.touch()
            return archive
        _need_builder()
        storage = _storage(folder)
        _make_base(storage)
        _build(storage, archive, recipe)
        older = sorted(folder.glob(f"{recipe.archive}-*.tar"), key=lambda path: path.stat().st_mtime)
        for old in older[:-ARCHIVES_KEPT]:
            old.unlink()
        return archive


SUITE_IMAGE = "localhost/e2e/agnhost:2.59"
"""As Kubernetes' own suite names what its pods run in, from a registry `localhost/e2e`."""


def suite_image() -> Path:
    """The base with the program of the suite's pods, as a docker archive; tests/cluster/build.sh external makes that.

    Errors: ImageError.
    """
    folder = tools_dir().parent / "images"
    with locked(folder / "lock"):
        _need_builder()
        storage, archive = _storage(folder), folder / "suite.tar"
        _make_base(storage)
        container = _buildah(storage, "from", "--pull=never", BASE)
        _buildah(storage, "add", "--quiet", container, str(tools_dir() / "agnhost"), "/agnhost")
        _buildah(storage, "config", "--entrypoint", '["/agnhost"]', "--cmd", "pause", container)
        _buildah(storage, "commit", "--quiet", "--rm", container, SUITE_IMAGE)
        archive.unlink(missing_ok=True)
        _buildah(storage, "push", "--quiet", SUITE_IMAGE, f"docker-archive:{archive}:{SUITE_IMAGE}")
    return archive


def _need_builder() -> None:
    if reason := obstacle():
        raise ImageError(reason)


def _context_files(recipe: Recipe) -> list[Path]:
    found = [recipe.folder / recipe.dockerfile]
    for name in recipe.context:
        root = recipe.folder / name
        found += sorted(root.rglob("*")) if root.is_dir() else [root]
    return [path for path in found if path.is_file() and "__pycache__" not in path.parts]


def _hash_of(files: list[Path], *texts: str) -> str:
    digest = hashlib.sha256("\0".join(texts).encode())
    for path in files:
        content = path.read_bytes()
        digest.update(f"\0{path.relative_to(REPOSITORY)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _base_key() -> str:
    return f"{_release()} {BASE_PACKAGES} {' '.join(LEFT_OUT)}"


def _release() -> str:
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "")


def _storage(folder: Path) -> Path:
    """buildah's folder for this base and these dependencies; what older ones left is removed."""
    key = _hash_of([REPOSITORY / ".ci/requirements-image.lock"], _base_key())[:16]
    wanted = folder / f"buildah-{key}"
    for other in folder.glob("buildah-*"):
        if other != wanted:
            shutil.rmtree(other)
    wanted.mkdir(exist_ok=True)
    return wanted


def _make_base(storage: Path) -> None:
    if _buildah(storage, "images", "--quiet", "--filter", f"reference={BASE}"):
        return
    container = _buildah(storage, "from", "scratch")
    _buildah(storage, "add", "--quiet", container, str(_base_archive(storage.parent)), "/")
    _buildah(storage, "commit", "--quiet", "--rm", container, BASE)


def _base_archive(folder: Path) -> Path:
    """The minimal system as a tar file; older ones are removed."""
    wanted = folder / f"base-{_hash_of([], _base_key())[:16]}.tar"
    if not wanted.exists():
        for other in folder.glob("base-*"):
            other.unlink()
        # Named so that mmdebstrap sees what it is to make.
        unfinished = folder / "base-unfinished.tar"
        left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT]
        includes = f"--include={BASE_PACKAGES}"
        sources = [str(path) for path in _package_sources()]
        _run("mmdebstrap", "--quiet", "--variant=essential", includes, *left_out, _release(), str(unfinished), *sources)
        unfinished.replace(wanted)
    return wanted


def _package_sources() -> Iterator[Path]:
    """Where this machine gets its own packages: the distribution's file, without other people's repositories."""
    for path in (Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))):
        if path.exists() and "Signed-By: /usr/share/keyrings/debian-archive" in path.read_text():
            yield path


def _build(storage: Path, archive: Path, recipe: Recipe) -> None:
    lent = [f"--volume={path}:{path}:ro" for path in HOST_FILES if Path(path).exists()]
    settings = ["--layers", "--pull=never", "--network=host", f"--build-arg=BASE={BASE}", *lent]
    file = f"--file={recipe.folder / recipe.dockerfile}"
    _buildah(storage, "build", "--quiet", *settings, f"--tag={recipe.image}", file, str(recipe.folder))
    unfinished = archive.with_suffix(".part")
    unfinished.unlink(missing_ok=True)
    _buildah(storage, "push", "--quiet", recipe.image, f"docker-archive:{unfinished}:{recipe.image}")
    unfinished.replace(archive)


def _buildah(storage: Path, *arguments: str) -> str:
    places = ["--root", str(storage / "storage"), "--runroot", str(storage / "run"), "--storage-driver", "overlay"]
    return _run("buildah", *places, *arguments, BUILDAH_ISOLATION="chroot")


def _run(*argv: str, **environment: str) -> str:
    done = subprocess.run(
        argv,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=STEP_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        raise ImageError(f"{' '.join(argv[:2])} … {argv[-1]}: exit {done.returncode}\n{tail}")
    return done.stdout.strip()


def main() -> None:
    """Build, and say where the archive is and how large."""
    if given := os.environ.get("E2E_IMAGE"):
        print(f"nothing to build: E2E_IMAGE is {given}")
        return
    begun = time.monotonic()
    for recipe in (PROJECT, GANESHA):
        archive = image_archive(recipe)
        size = f"{archive.stat().st_size / 1e6:.0f} MB"
        print(f"{recipe.image}: {size}, after {time.monotonic() - begun:.1f} s\n  {archive}")


if __name__ == "__main__":
    try:
        main()
    except ImageError as error:
        sys.exit(f"image: {error}")
