"""datastore.api.resolve, secretmanifest and mountspec: from manifests to the contract of one mount."""

from __future__ import annotations

import json

import pytest

from datastore.api import mountspec
from datastore.api.manifest import Manifest, parse
from datastore.api.mountspec import MountSpec
from datastore.api.resolve import Directories, MountOptions, mount_spec, state_name, uses_own_credentials
from datastore.api.source import (
    GlusterFSLocation,
    NFSLocation,
    S3Location,
    SFTPLocation,
    SSHCredentials,
    StaticCredentials,
    credentials_of,
)
from datastore.errors import InvalidManifest
from datastore.secret import Secret
from tests.promises import promise

CANARY = "CANARYsecretCANARYsecret"
DIRECTORIES = Directories(state_root="/state", cache_dir="/cache")


def manifest(spec: str, secret: str = "") -> Manifest:
    head = "apiVersion: datastore.dev/v1alpha1\nkind: Datastore\nmetadata: {name: digits}\n"
    more = f"---\napiVersion: v1\nkind: Secret\n{secret}" if secret else ""
    return parse(f"{head}spec: {spec}\n{more}", "f.yaml")


def resolved(found: Manifest, options: MountOptions | None = None) -> MountSpec:
    return mount_spec(found, found.pick(), "/mnt/digits", DIRECTORIES, options or MountOptions())


def keys(names: str) -> str:
    return f"metadata: {{name: keys}}\nstringData: {names}\n"


WITH_SECRET = "{s3: {bucket: digits, credentialsSecret: keys}}"


def test_a_whole_manifest_becomes_a_specification() -> None:
    text = "{s3: {bucket: digits, prefix: a, endpoint: 'http://h:1', region: r, forcePathStyle: true, create: true}, "
    found = resolved(
        manifest(text + "capacity: 1Gi, cache: {size: 5M, dir: /fast}, metadataTTL: 5s, attributes: listing}")
    )
    assert found.source == S3Location(
        bucket="digits", prefix="a/", endpoint="http://h:1", region="r", force_path_style=True, create=True
    )
    assert (found.name, found.mountpoint, found.cache_dir) == ("digits", "/mnt/digits", "/fast")
    assert (found.capacity_bytes, found.cache_size_bytes, found.metadata_ttl_s) == (1 << 30, 5_000_000, 5.0)
    assert (found.attributes, found.read_only, found.transport) == ("listing", False, "kernel")


def test_read_only_on_the_command_line_tightens_the_manifest_and_its_defaults() -> None:
    found = resolved(
        manifest("{s3: {bucket: digits}}"), MountOptions(read_only=True, allow_other=True, transport="libfuse")
    )
    assert (found.read_only, found.attributes, found.metadata_ttl_s) == (True, "listing", 60.0)
    assert (found.allow_other, found.transport) == (True, "libfuse")


def test_a_specification_survives_the_pipe_and_hides_its_keys_elsewhere() -> None:
    secret = keys(f"{{AWS_ACCESS_KEY_ID: id, AWS_SECRET_ACCESS_KEY: {CANARY}, AWS_SESSION_TOKEN: {CANARY}}}")
    found = resolved(manifest(WITH_SECRET, secret))
    assert mountspec.from_json(found.to_json()) == found
    assert CANARY in found.to_json()
    assert CANARY not in repr(found)
    assert CANARY not in str(found.without_secrets())


def test_a_specification_says_only_what_differs_from_the_defaults() -> None:
    """So an older supervisor accepts it from a newer node plugin."""
    said = json.loads(resolved(manifest("{s3: {bucket: digits}}")).to_json())
    assert said["source"] == {"kind": "s3", "bucket": "digits"}
    assert not {"memory_bytes", "write_back_s", "conflict", "used_bytes"} & set(said)
    assert said["version"] == mountspec.VERSION


@pytest.mark.parametrize(
    ("access", "secret"),
    [
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("accessKeyID", "secretAccessKey"),
        ("access_key_id", "secret_access_key"),
        ("key_id", "access_secret"),
        ("access_key", "secret_key"),
    ],
)
def test_secrets_made_for_other_drivers_are_understood(access: str, secret: str) -> None:
    found = credentials_of(resolved(manifest(WITH_SECRET, keys(f'{{{access}: "id\\n", {secret}: "key\\n"}}'))).source)
    assert isinstance(found, StaticCredentials)
    assert (found.access_key_id, found.secret_access_key.reveal(), found.session_token) == ("id", "key", None)


@pytest.mark.parametrize(
    ("secret", "text"),
    [
        (keys("{AWS_ACCESS_KEY_ID: id}"), "Secret keys has no AWS_SECRET_ACCESS_KEY, or it is empty"),
        (keys(f"{{AWS_SECRET_ACCESS_KEY: {CANARY}}}"), "Secret keys has no AWS_ACCESS_KEY_ID, or it is empty"),
        (
            keys("{AWS_ACCESS_KEY_ID: ' ', AWS_SECRET_ACCESS_KEY: b}"),
            "Secret keys has no AWS_ACCESS_KEY_ID, or it is empty",
        ),
        (
            keys("{accessKeyID: a, secretAccessKey: b, ca.crt: junk}"),
            "ca.crt of Secret keys must be PEM text that holds -----BEGIN CERTIFICATE-----",
        ),
    ],
)
def test_a_secret_without_the_keys_is_refused(secret: str, text: str) -> None:
    with pytest.raises(InvalidManifest) as caught:
        resolved(manifest(WITH_SECRET, secret))
    assert str(caught.value) == f"f.yaml (Datastore digits): spec.s3.credentialsSecret: {text}"


@pytest.mark.parametrize(
    ("secret", "hint"),
    [
        ("metadata: {name: keyz}\n", "did you mean keyz?"),
        ("metadata: {name: other}\n", "add it in namespace default"),
        ("metadata: {name: keys, namespace: b}\n", "add it in namespace default"),
    ],
)
def test_a_secret_that_is_not_there_is_named(secret: str, hint: str) -> None:
    with pytest.raises(InvalidManifest) as caught:
        resolved(manifest(WITH_SECRET, secret))
    where = "f.yaml (Datastore digits): spec.s3.credentialsSecret names Secret keys, which is not in this file"
    assert str(caught.value) == f"{where}; {hint}"


def test_a_file_without_any_secret_uses_the_default_chain() -> None:
    found = manifest(WITH_SECRET)
    assert credentials_of(resolved(found).source) is None
    assert uses_own_credentials(found, found.pick())
    assert not uses_own_credentials(manifest("{s3: {bucket: digits}}"), manifest("{s3: {bucket: digits}}").pick())


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        (
            "{nfs: {server: h, path: /a, mountOptions: [vers=4.1, nconnect=4]}}",
            NFSLocation(server="h", path="/a", options=("vers=4.1", "nconnect=4")),
        ),
        ("{nfs: {server: nfs.example.org, path: /srv/a}}", NFSLocation(server="nfs.example.org", path="/srv/a")),
        ("{sftp: {host: h, path: /data, port: 2022}}", SFTPLocation(host="h", path="/data", port=2022)),
        (
            "{glusterfs: {servers: [a, b], volume: v, path: /x}}",
            GlusterFSLocation(servers=("a", "b"), volume="v", path="/x"),
        ),
    ],
)
def test_every_kind_of_source_survives_the_pipe(spec: str, source: object) -> None:
    found = resolved(manifest(spec))
    assert found.source == source
    assert mountspec.from_json(found.to_json()) == found


def test_an_ssh_secret_is_understood_and_hidden() -> None:
    secret = keys(f"{{username: ada, ssh-privatekey: '{CANARY}', password: {CANARY}}}")
    found = resolved(manifest("{sftp: {host: h, path: /data, credentialsSecret: keys}}", secret))
    credentials = credentials_of(found.source)
    assert credentials == SSHCredentials(username="ada", private_key=Secret(CANARY + "\n"), password=Secret(CANARY))
    assert mountspec.from_json(found.to_json()) == found
    assert CANARY not in repr(found) + str(found.without_secrets())


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("{claim: {name: a}}", "spec.claim is storage of a cluster: only pods can mount it"),
        ("{nfs: {}}", "spec.nfs: an export of its own is made in the cluster; here it needs server and path"),
        ("{storageClassName: a}", "spec.storageClassName is storage of a cluster: only pods can mount it"),
    ],
)
def test_backends_that_only_a_cluster_has_are_refused_on_a_laptop(spec: str, text: str) -> None:
    with pytest.raises(InvalidManifest) as caught:
        resolved(manifest(spec))
    assert str(caught.value) == f"f.yaml (Datastore digits): {text}"


@promise("S-232")
@pytest.mark.parametrize(
    "option", ["addr=10.0.0.1", "port=1", "sec=krb5", "vers=2", "nconnect=4,port=1", "ro", "timeo=0", "", "hard\n"]
)
def test_options_of_a_users_export_do_not_choose_another_server(option: str) -> None:
    """They don't choose the node's identity either."""
    nfs = {"server": "h", "path": "/a", "mountOptions": [option]}
    with pytest.raises(InvalidManifest, match=r"spec.nfs.mountOptions\[0\] must be one option of nfs\(5\): hard"):
        manifest(json.dumps({"nfs": nfs}))
    with pytest.raises(InvalidManifest, match="mountOptions with server and path"):
        manifest("{nfs: {mountOptions: [softerr]}}")


def test_another_version_is_refused_with_the_command_that_helps() -> None:
    newer = json.loads(resolved(manifest("{s3: {bucket: digits}}")).to_json()) | {"version": 3}
    with pytest.raises(InvalidManifest, match=r"version 3, .* knows version 2: replace it .* kubectl"):
        mountspec.from_json(json.dumps(newer))


def test_the_state_directory_is_the_same_for_the_same_data_at_the_same_place() -> None:
    first = resolved(manifest("{s3: {bucket: digits}}")).state_dir
    assert first == resolved(manifest("{readOnly: true, s3: {bucket: digits, region: x}}")).state_dir
    assert first.startswith("/state/digits-")


def test_unsent_changes_can_not_reach_other_data() -> None:
    texts = ["bucket: digits", "bucket: digitz", "bucket: digits, prefix: a", "bucket: digits, endpoint: 'http://h'"]
    found = {resolved(manifest(f"{{s3: {{{text}}}}}")).state_dir for text in texts}
    assert len(found) == len(texts)
    assert state_name("a", "/m", "x") != state_name("a", "/n", "x")


def test_two_ssh_servers_on_one_host_share_no_state() -> None:
    """A mount removes hidden names that it left on its server; the other server's names are not its own."""
    texts = ["{sftp: {host: h, path: /a}}", "{sftp: {host: h, path: /a, port: 2022}}"]
    specs = [resolved(manifest(text)) for text in texts]
    assert len({each.state_dir for each in specs}) == len(texts)
    assert [str(each.source) for each in specs] == ["sftp://h/a", "sftp://h:2022/a"]


def test_a_long_name_makes_a_short_directory() -> None:
    assert len(state_name("a" * 253, "/m", "x")) <= 81


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"version": 2}', '{"version": 1}', '{"version": 1, "s3": {}}', "null"]
)
def test_a_text_that_is_no_specification_is_refused(text: str) -> None:
    with pytest.raises(InvalidManifest):
        mountspec.from_json(text)
