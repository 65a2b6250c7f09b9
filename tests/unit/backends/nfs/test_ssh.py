"""datastore.backends.nfs.ssh: keys of hosts and users. Connections: tests/nfs/test_hostexport.py."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from datastore.backends.nfs.ssh import known_hosts, private_key
from datastore.errors import InvalidManifest


@pytest.mark.parametrize("kind", ["ed25519", "ecdsa", "rsa"])
def test_keys_of_every_common_type(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", path], check=True, timeout=60)
    key = private_key(path.read_text())
    public = path.with_suffix(".pub").read_text()
    scanned = f"# nas:22 SSH-2.0-OpenSSH\nnas,10.0.0.1 {public}\n\nnas ssh-unheard-of AAAA\n"
    assert [(name, each.get_base64()) for name, each in known_hosts(scanned)] == [
        ("nas", key.get_base64()),
        ("10.0.0.1", key.get_base64()),
    ]


def test_a_key_that_is_none_is_told_without_a_word_of_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidManifest) as caught:
        private_key("-----BEGIN OPENSSH PRIVATE KEY-----\nc2VjcmV0\n-----END OPENSSH PRIVATE KEY-----\n")
    assert "c2VjcmV0" not in str(caught.value)
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", path], check=True, timeout=60)
    with pytest.raises(InvalidManifest, match="passphrase"):
        private_key(path.read_text())
