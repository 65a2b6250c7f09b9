"""What can't be mounted over SFTP, and in which words."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.promises import promise
from tests.sftp.mounts import DirectoryMount
from tests.sftp.sshd import SSHServer, running
from tests.tools.mounting import NAME

pytestmark = [pytest.mark.fuse, pytest.mark.plain_user, pytest.mark.timeout(600)]

SFTP = "Subsystem sftp internal-sftp"
OTHER_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"


def refused(server: SSHServer, home: Path, directory: str | None = None, **sftp: Any) -> str:
    """What the command says in its one line; of a server that it waited too long for it would say something else. What
    `doctor` says of it, and its exit code, are the same."""
    folder = Path(tempfile.mkdtemp(prefix="r", dir=home))
    mount = DirectoryMount(server, Path(directory or folder), folder=folder, sftp=sftp)
    done = mount.try_mount()
    assert done.returncode != 0
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    doctor, said = asked(mount)
    assert (doctor, said["level"]) == (done.returncode, "fail")
    assert said["text"] in lines[0]
    assert said["todo"]
    return lines[0]


def asked(mount: DirectoryMount) -> tuple[int, dict[str, Any]]:
    """The exit code of `doctor`, and what it finds of the storage; it has nothing else to say."""
    done = mount.command("doctor", mount.folder / "datastore.yaml", "-o", "json")
    assert done.stderr == ""
    (found,) = (each for each in json.loads(done.stdout) if each["check"] == NAME)
    return done.returncode, found


@promise("S-278")
def test_a_host_key_that_is_not_known(sshd: SSHServer, clean_environment: Path) -> None:
    """Neither one that the manifest does not have nor, without one there, one that the user does not have."""
    other = f"[127.0.0.1]:{sshd.port} {OTHER_KEY}\n"
    said = refused(sshd, clean_environment, knownHosts=other)
    assert "has a host key that spec.sftp.knownHosts does not have: ssh-ed25519 SHA256:" in said
    assert f"ssh-keyscan -p {sshd.port} 127.0.0.1" in said
    said = refused(sshd, clean_environment, knownHosts=None)
    assert f"127.0.0.1, port {sshd.port}, has a host key that your known_hosts file does not have" in said
    assert f"`ssh -p {sshd.port} 127.0.0.1` puts it there, after `ssh-keygen -R '[127.0.0.1]:{sshd.port}'`" in said


@promise("S-278")
def test_a_login_that_is_refused(sshd: SSHServer, clean_environment: Path) -> None:
    """The user has no key of his own here."""
    said = refused(sshd, clean_environment, credentialsSecret=None)
    assert "refuses the login with these keys" in said
    assert f"`ssh -v -p {sshd.port} 127.0.0.1` shows" in said
    assert "a key with a passphrase has to be in your ssh-agent" in said


@promise("S-278")
def test_a_directory_that_is_not_there(sshd: SSHServer, clean_environment: Path) -> None:
    assert "has no directory /nowhere/at/all" in refused(sshd, clean_environment, "/nowhere/at/all")
    assert "is no directory" in refused(sshd, clean_environment, str(sshd.directory / "id"))


@promise("S-278")
def test_a_server_without_sftp_or_none(clean_environment: Path) -> None:
    with running(clean_environment, more="") as server:
        assert "offers no SFTP" in refused(server, clean_environment)
        with server.silent():
            assert "can't be reached: no answer in time" in refused(server, clean_environment)
        server.stop()
        assert f"the SSH server 127.0.0.1, port {server.port}, can't be reached: Connection refused" in refused(
            server, clean_environment
        )


@promise("S-278")
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", "Session request failed (sshd_config needs a Subsystem sftp)"),
        (f"MaxSessions 0\n{SFTP}", "open failed (the server's log says why: ChrootDirectory or"),
        (f"ForceCommand echo hello world\n{SFTP}", "(the login's shell, or a ForceCommand, ends or prints something"),
        (f"ForceCommand /bin/false\n{SFTP}", "(the login's shell, or a ForceCommand, ends or prints something"),
    ],
)
def test_a_server_that_lets_us_in_and_begins_no_sftp(clean_environment: Path, more: str, words: str) -> None:
    with running(clean_environment, more=more) as server:
        said = refused(server, clean_environment)
        assert "offers no SFTP" in said
        assert words in said


@promise("S-278")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("IdentityFile {own}/none", "No such file or directory: {own}/none"),
        ("IdentityFile {own}/known_hosts", "Invalid private key"),
        ("Port twenty", "{own}/config line 2: Invalid Port"),
        ("ProxyCommand no-such-program", "No such file or directory: no-such-program"),
    ],
)
def test_what_is_wrong_with_the_users_own_configuration(
    sshd: SSHServer, clean_environment: Path, config: str, words: str
) -> None:
    """It is not said of the server."""
    own = clean_environment / ".ssh"
    own.mkdir(mode=0o700, exist_ok=True)
    (own / "known_hosts").write_text(sshd.known_hosts)
    (own / "config").write_text(f"Host 127.0.0.1\n    {config.format(own=own)}\n")
    try:
        said = refused(sshd, clean_environment, knownHosts=None, credentialsSecret=None)
        assert "is not asked, because your own SSH configuration, or a file that it names, can't be used: " in said
        assert words.format(own=own) in said
    finally:
        for name in ("known_hosts", "config"):
            (own / name).unlink()
        own.rmdir()


@promise("S-278")
def test_the_users_own_known_hosts_and_keys(sshd: SSHServer, clean_environment: Path) -> None:
    """As his ssh has them."""
    own = clean_environment / ".ssh"
    own.mkdir(mode=0o700)
    (own / "known_hosts").write_text(sshd.known_hosts)
    (own / "id_ed25519").write_text(sshd.private_key)
    (own / "id_ed25519").chmod(0o600)
    folder = Path(tempfile.mkdtemp(prefix="r", dir=clean_environment))
    mount = DirectoryMount(sshd, folder, folder=folder, sftp={"knownHosts": None, "credentialsSecret": None})
    try:
        mount.mount()
        assert "mnt" in os.listdir(mount.path)
        seen = sorted(os.listdir(folder))
        code, found = asked(mount)
        assert (code, found["level"]) == (0, "ok")
        assert f"sftp://127.0.0.1:{sshd.port}{folder}: host key and login are right" in found["text"]
        assert sorted(os.listdir(folder)) == seen
    finally:
        mount.end()
        for name in ("known_hosts", "id_ed25519"):
            (own / name).unlink()
