"""The peers: other programs that mount a bucket, if they are installed, and how each is started.

The options are those of a user who wants speed and has read the manual; s3fs and rclone stay in the foreground, so that
they are child processes of the bench.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.bucket import BUCKET
from tests.servers import Server

Command = list[str | Path]
HELP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a peer finds things: the server, its mount point, its cache, and a folder for its files."""

    server: Server
    target: Path
    cache: Path
    files: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """plain: it shows objects as they are (JuiceFS keeps its own blocks). late: it answers changes before S3 has them,
    even if the bench's first look finds the few changes there. prepare: runs once before each mount. trusts: it can be
    given a certificate authority."""

    name: str
    binary: str
    command: Callable[[Place], Command]
    environment: Callable[[Place], Mapping[str, str]] = lambda place: {}
    prepare: Callable[[Place], None] = lambda place: None
    plain: bool = True
    late: bool = False
    trusts: bool = True

    @property
    def present(self) -> bool:
        """Whether it is installed."""
        return shutil.which(self.binary) is not None


def _s3fs_keys(place: Place) -> None:
    file = place.files / "s3fs-keys"
    file.touch(mode=0o600)
    file.write_text(f"{place.server.access_key}:{place.server.secret_key}\n")


def _s3fs(*more: str) -> Callable[[Place], Command]:
    def command(place: Place) -> Command:
        options = [
            f"url={place.server.endpoint}",
            "use_path_request_style",
            f"passwd_file={place.files / 's3fs-keys'}",
            "kernel_cache",
            "max_stat_cache_size=200000",
            "multipart_size=52",
            "parallel_count=16",
            "dbglevel=err",
            *(option.format(cache=place.cache) for option in more),
        ]
        return ["s3fs", BUCKET, place.target, "-f", "-o", ",".join(options)]

    return command


@cache
def _rclone_knows() -> str:
    done = subprocess.run(
        ["rclone", "mount", "--help"], capture_output=True, text=True, timeout=HELP_TIMEOUT_S, check=False
    )
    return done.stdout


def _rclone(mode: str) -> Callable[[Place], Command]:
    def command(place: Place) -> Command:
        # Options that only newer releases have: parallel chunks, and links through the mount.
        newer = {"--vfs-read-chunk-streams": ["4"], "--vfs-links": []}
        known = [word for option, values in newer.items() if option in _rclone_knows() for word in (option, *values)]
        return [
            *("rclone", "mount", f"bench:{BUCKET}", place.target),
            *("--config", place.files / "rclone.conf", "--cache-dir", place.cache),
            *("--vfs-cache-mode", mode, "--dir-cache-time", "5m", "--vfs-read-chunk-size", "32M"),
            *("--buffer-size", "32M", "--transfers", "16", "--s3-upload-concurrency", "8", "--s3-chunk-size", "16M"),
            *known,
        ]

    return command


def _rclone_config(place: Place) -> None:
    server = place.server
    (place.files / "rclone.conf").write_text(
        f"[bench]\ntype = s3\nprovider = Other\nendpoint = {server.endpoint}\nregion = {server.region}\n"
        f"access_key_id = {server.access_key}\nsecret_access_key = {server.secret_key}\n"
    )


def _aws_keys(place: Place) -> Mapping[str, str]:
    server = place.server
    return {
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "AWS_REGION": server.region,
    }


def _mount_s3(*more: str) -> Callable[[Place], Command]:
    def command(place: Place) -> Command:
        where = ["--endpoint-url", place.server.endpoint, "--region", place.server.region, "--force-path-style"]
        rights = ["--allow-delete", "--allow-overwrite", "--foreground"]
        cached = [option.format(cache=place.cache) for option in more]
        return ["mount-s3", BUCKET, place.target, *where, *rights, *cached]

    return command


def _goofys(program: str) -> Callable[[Place], Command]:
    def command(place: Place) -> Command:
        where = ["--endpoint", place.server.endpoint, "--region", place.server.region]
        return [program, "-f", *where, BUCKET, place.target]

    return command


def _juicefs_database(place: Place) -> str:
    return f"sqlite3://{place.files / 'juicefs.db'}"


def _juicefs_format(place: Place) -> None:
    server = place.server
    where = ["--storage", "s3", "--bucket", f"{server.endpoint}/{BUCKET}"]
    keys = ["--access-key", server.access_key, "--secret-key", server.secret_key]
    name = f"juicefs-{place.files.name}"
    subprocess.run(
        ["juicefs", "format", *where, *keys, _juicefs_database(place), name],
        capture_output=True,
        timeout=HELP_TIMEOUT_S,
        check=True,
    )


def _juicefs(place: Place) -> Command:
    return ["juicefs", "mount", "--cache-dir", place.cache, _juicefs_database(place), place.target]


PEERS = (
    Peer(name="s3fs", binary="s3fs", command=_s3fs(), prepare=_s3fs_keys),
    Peer(name="s3fs-cache", binary="s3fs", command=_s3fs("use_cache={cache}"), prepare=_s3fs_keys),
    Peer(name="rclone-off", binary="rclone", command=_rclone("off"), prepare=_rclone_config),
    Peer(name="rclone-full", binary="rclone", command=_rclone("full"), prepare=_rclone_config, late=True),
    Peer(name="mount-s3", binary="mount-s3", command=_mount_s3(), environment=_aws_keys, trusts=False),
    Peer(
        name="mount-s3-cache",
        binary="mount-s3",
        command=_mount_s3("--cache", "{cache}"),
        environment=_aws_keys,
        trusts=False,
    ),
    Peer(name="goofys", binary="goofys", command=_goofys("goofys"), environment=_aws_keys),
    Peer(name="geesefs", binary="geesefs", command=_goofys("geesefs"), environment=_aws_keys, late=True),
    Peer(name="juicefs", binary="juicefs", command=_juicefs, prepare=_juicefs_format, plain=False),
)
