"""A place where a user who is not root can run the tests, whoever owns the checkout and the Python.

Root's checkout, virtual environment and tools may be out of that user's reach (in root's home, say), so root stages
copies of what is out of reach in a temporary directory. A user who is not root needs no staging.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import psutil

from tests.servers import tools_dir
from tests.tools.mounting import mounted_below

USER = "datastore-test"
CHECKOUT = Path(__file__).resolve().parents[1]
FUSE_DEVICE = Path("/dev/fuse")
NEEDED_STDLIB = "import ctypes, sqlite3, ssl, venv"
LEFTOVER_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where and as which user commands run. uid None: as the current user."""

    checkout: Path
    python: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    uid: int | None = None
    gid: int | None = None

    def popen(
        self, argv: Sequence[str | Path], environment: Mapping[str, str], output: IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command in the checkout, in a process group of its own. output None: inherited from this process."""
        return subprocess.Popen(
            argv,
            cwd=self.checkout,
            env={**environment, **self.environment},
            user=self.uid,
            group=self.gid,
            extra_groups=None if self.uid is None else [],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )


def here() -> Place:
    """The checkout as it is, for the current user."""
    return Place(checkout=CHECKOUT, python=Path(sys.executable))


@contextlib.contextmanager
def plain_place(user: str = USER) -> Iterator[Place]:
    """Make the place of a plain user. All of that user's processes end with it, so parallel runs need different users.

    Errors: OSError or CalledProcessError when it can't be made; the text says why.
    """
    if os.getuid() != 0:
        yield here()
        return
    account = _account(user)
    _open_fuse_device()
    with tempfile.TemporaryDirectory(prefix="datastore-plain-", ignore_cleanup_errors=True) as root:
        staging = Path(root)
        staging.chmod(0o755)
        try:
            yield _stage(staging, account)
        finally:
            _clear_leftovers(staging, account.pw_uid)


def _account(user: str) -> pwd.struct_passwd:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam(user)
    print(f"note: creating the user {user} for the tiers that run without root")
    subprocess.run(
        ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent", user], check=True
    )
    return pwd.getpwnam(user)


def _open_fuse_device() -> None:
    mode = stat.S_IMODE(FUSE_DEVICE.stat().st_mode)
    if mode & 0o006 != 0o006:
        print(
            f"note: chmod 0666 {FUSE_DEVICE} (was {mode:04o}); ordinary distributions have it so, fusermount3 needs it"
        )
        FUSE_DEVICE.chmod(0o666)


def _stage(staging: Path, account: pwd.struct_passwd) -> Place:
    checkout = staging / "checkout"
    copy_checkout(checkout)
    for name in ("home", "tmp"):
        (staging / name).mkdir()
    environment = {
        "HOME": str(staging / "home"),
        "TMPDIR": str(staging / "tmp"),
        "USER": account.pw_name,
        "LOGNAME": account.pw_name,
        "PATH": f"{staging / 'venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "KUBE_DATASTORE_TOOLS": str(_tools_for(account, staging)),
    }
    python = _python_for(account, staging)
    if python.is_relative_to(staging):
        # A copied Python finds its own shared library only by this variable.
        environment["LD_LIBRARY_PATH"] = str(staging / "python" / "lib")
    place = Place(checkout=checkout, python=python, uid=account.pw_uid, gid=account.pw_gid, environment=environment)
    place = _with_environment(place, account, staging)
    subprocess.run(["chown", "-R", f"{account.pw_uid}:{account.pw_gid}", staging], check=True)
    return place


def copy_checkout(target: Path) -> None:
    """Copy the files that git tracks or would add; links stay links."""
    command = [
        "git",
        "-c",
        f"safe.directory={CHECKOUT}",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    names = subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(None, names):
        source = CHECKOUT / name
        if source.is_symlink() or source.exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # removed since git listed it
                shutil.copy2(source, target / name, follow_symlinks=False)


def _can(account: pwd.struct_passwd, argv: Sequence[str | Path]) -> bool:
    """Whether the user can run a command, from a directory that everybody reaches."""
    with contextlib.suppress(OSError):
        done = subprocess.run(
            argv, cwd="/", user=account.pw_uid, group=account.pw_gid, extra_groups=[], env={}, capture_output=True
        )
        return done.returncode == 0
    return False


def _python_for(account: pwd.struct_passwd, staging: Path) -> Path:
    """Return a Python of our minor version that the user can run; copy our own prefix when there is none."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (Path(sys.base_prefix, "bin", name), Path("/usr/bin", name), Path("/usr/local/bin", name)):
        if _can(account, [candidate, "-c", NEEDED_STDLIB]):
            return candidate
    print(f"note: copying {sys.base_prefix} for {account.pw_name}, who can't reach it")
    skipped = shutil.ignore_patterns("site-packages", "__pycache__", "test", "*.a", "share", "include")
    shutil.copytree(sys.base_prefix, staging / "python", symlinks=True, ignore=skipped)
    return staging / "python" / "bin" / name


def _tools_for(account: pwd.struct_passwd, staging: Path) -> Path:
    tools = tools_dir()
    if not tools.is_dir() or _can(account, ["test", "-x", tools / "versitygw"]):
        return tools.parent
    (staging / "tools" / "bin").mkdir(parents=True)
    # Only the servers: the tools of the test cluster are large, and only root uses them.
    for server in ("versitygw", "minio"):
        if (tools / server).exists():
            shutil.copy2(tools / server, staging / "tools" / "bin")
    return staging / "tools"


def _with_environment(place: Place, account: pwd.struct_passwd, staging: Path) -> Place:
    """Make a virtual environment that borrows our installed packages, with the staged checkout in front of them."""
    venv = staging / "venv"
    subprocess.run(
        [place.python, "-m", "venv", "--without-pip", venv], check=True, env={**os.environ, **place.environment}
    )
    ours = Path(psutil.__file__).parents[1]
    if not _can(account, ["test", "-r", ours / "psutil" / "__init__.py"]):
        # Bytecode that a process is just writing has such a temporary name until it is complete.
        unfinished = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(ours, staging / "site-packages", symlinks=True, ignore=unfinished)
        ours = staging / "site-packages"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    borrowed = venv / "lib" / version / "site-packages" / "borrowed.pth"
    borrowed.write_text(f"{place.checkout}\n{ours}\n")
    python = venv / "bin" / "python"
    for name, module in (("datastore", "datastore.cli.main"), ("moto_server", "moto.server")):
        command = venv / "bin" / name
        command.write_text(f"#!{python}\nimport sys\n\nfrom {module} import main\n\nsys.exit(main())\n")
        command.chmod(0o755)
    return replace(place, python=python)


def _clear_leftovers(staging: Path, uid: int) -> None:
    """Unmount and end what a broken run left, and say so; the tests themselves fail on their own leaks."""
    for mountpoint in mounted_below(staging):
        print(f"warning: {mountpoint} was left mounted")
        subprocess.run(["umount", "--lazy", mountpoint], check=False)
    left = [process for process in psutil.process_iter(["uids"]) if process.info["uids"].real == uid]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            print(f"warning: process {process.pid} was left: {' '.join(process.cmdline())[:200]}")
            process.terminate()
    for process in psutil.wait_procs(left, timeout=LEFTOVER_GRACE_S)[1]:
        process.kill()
