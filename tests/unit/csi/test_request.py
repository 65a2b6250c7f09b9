from __future__ import annotations

from pathlib import Path

import pytest

from datastore.api.source import NFSLocation, credentials_of
from datastore.api.volumecontext import MEMORY, SOURCE
from datastore.csi import request as parse
from datastore.csi.settings import Settings, from_environment
from datastore.csi.spec import csi_pb2 as csi
from datastore.errors import InvalidManifest
from tests.promises import promise

MODES = csi.VolumeCapability.AccessMode
SPEC = {"datastore.dev/spec": '{"s3": {"bucket": "b-1", "endpoint": "http://s3"}}'}
KEYS = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": "canary"}


def capability(mode: MODES.Mode = MODES.MULTI_NODE_MULTI_WRITER, *flags: str, group: str = "") -> csi.VolumeCapability:
    return csi.VolumeCapability(
        mount=csi.VolumeCapability.MountVolume(mount_flags=flags, volume_mount_group=group),
        access_mode=MODES(mode=mode),
    )


def staged(**more: object) -> csi.NodeStageVolumeRequest:
    given = {
        "volume_id": "team/data/1",
        "staging_target_path": "/k/staging",
        "volume_capability": capability(),
        "volume_context": SPEC,
        "secrets": KEYS,
    }
    return csi.NodeStageVolumeRequest(**{**given, **more})  # type: ignore[arg-type]


def test_a_stage_request_becomes_a_mount_specification() -> None:
    flags = capability(MODES.SINGLE_NODE_READER_ONLY, "uid=1,gid=2", "umask=027", "ro", group="3000")
    wanted = parse.stage(staged(volume_capability=flags))
    spec = parse.mount_spec(wanted, wanted.staging_path, Settings(node_id="n", plugin_dir=Path("/p")))
    assert (spec.name, spec.mountpoint, spec.read_only) == ("data", "/k/staging", True)
    assert (spec.uid, spec.gid, spec.umask, spec.group) == (1, 2, 0o27, 3000)
    assert spec.allow_other
    assert spec.state_dir == f"/p/state/{parse.key_of('team/data/1')}"
    assert credentials_of(spec.source) is not None
    assert "canary" not in repr(wanted) + repr(spec)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"volume_id": ""}, "volume_id is missing"),
        ({"staging_target_path": ""}, "staging_target_path is missing"),
        ({"staging_target_path": "k"}, "not an absolute path"),
        ({"staging_target_path": "/k/../etc"}, "not an absolute path"),
        ({"volume_capability": None}, "volume_capability is missing"),
        ({"volume_capability": csi.VolumeCapability(block=csi.VolumeCapability.BlockVolume())}, "type mount"),
        ({"volume_capability": capability(MODES.UNKNOWN)}, "no access mode"),
        ({"volume_capability": capability(MODES.SINGLE_NODE_WRITER, "noatime")}, "'noatime' is unknown"),
        ({"volume_capability": capability(MODES.SINGLE_NODE_WRITER, "umask=9")}, "octal"),
        ({"volume_capability": capability(MODES.SINGLE_NODE_WRITER, "uid=root")}, "uid has to be a number"),
        ({"volume_capability": capability(group="staff")}, "volume_mount_group has to be a number"),
    ],
)
def test_what_is_wrong_with_a_request_is_named(change: dict[str, object], said: str) -> None:
    settings = Settings(node_id="n", plugin_dir=Path("/p"))
    with pytest.raises(InvalidManifest, match=said):
        parse.mount_spec(parse.stage(staged(**change)), "/m", settings)


@promise("S-232")
def test_an_nfs_volume_has_the_mount_options_of_nfs_and_owners_of_its_own() -> None:
    settings = Settings(node_id="n", plugin_dir=Path("/p"))
    context = {"datastore.dev/spec": '{"nfs": {"server": "h", "path": "/a"}}'}
    modern = capability(MODES.MULTI_NODE_MULTI_WRITER, "nconnect=4,softerr", "ro", group="3000")
    spec = parse.mount_spec(parse.stage(staged(volume_context=context, volume_capability=modern)), "/m", settings)
    assert isinstance(spec.source, NFSLocation)
    assert spec.source.options == ("nconnect=4", "softerr")
    owned = capability(MODES.MULTI_NODE_MULTI_WRITER, "uid=1")
    with pytest.raises(InvalidManifest, match="its server says who owns what"):
        parse.mount_spec(parse.stage(staged(volume_context=context, volume_capability=owned)), "/m", settings)


def test_an_inline_volume_needs_no_staging_path_and_reads_only_when_its_pod_does() -> None:
    request = csi.NodePublishVolumeRequest(
        volume_id="csi-1",
        target_path="/k/pods/1/",
        volume_capability=capability(MODES.SINGLE_NODE_WRITER),
        readonly=True,
        volume_context={"csi.storage.k8s.io/ephemeral": "true", "bucket": "b-1"},
        secrets=KEYS,
    )
    wanted = parse.publish(request)
    assert wanted.ephemeral
    assert wanted.access.read_only
    assert wanted.target_path == "/k/pods/1"
    request.volume_context.clear()
    with pytest.raises(InvalidManifest, match="staging_target_path is missing"):
        parse.publish(request)


@pytest.mark.parametrize("volume_id", ["csi-0123", "s3/http%3A%2F%2Fx/b/1/p/", "Ünlike/anything\n", "x" * 5000])
def test_any_volume_id_has_a_name_and_a_directory(volume_id: str) -> None:
    name = parse.name_of(volume_id)
    assert 0 < len(name) < 64
    assert name.replace("-", "").isalnum()
    assert len(parse.key_of(volume_id)) == 32


def test_settings_come_from_the_environment() -> None:
    settings = from_environment({"NODE_NAME": "n", "CSI_ENDPOINT": "unix:///x/csi.sock", "MOUNT_MEMORY": "2Gi"})
    assert from_environment({}).memory_bytes == 512 << 20
    assert settings.csi_socket == Path("/x/csi.sock")
    assert settings.memory_bytes == 2 << 30
    assert settings.registry_dir is None
    with pytest.raises(InvalidManifest, match="environment"):
        from_environment({"HTTP_PORT": "many"})
    with pytest.raises(InvalidManifest, match="at least 192Mi"):
        from_environment({"MOUNT_MEMORY": "1Mi"})


@promise("S-118")
def test_the_memory_of_a_mount_is_the_volumes_or_the_nodes() -> None:
    settings = Settings(node_id="n", plugin_dir=Path("/p"), memory_bytes=300 << 20)
    plain = parse.mount_spec(parse.stage(staged()), "/m", settings)
    own = parse.mount_spec(parse.stage(staged(volume_context={**SPEC, MEMORY: "1Gi"})), "/m", settings)
    assert (plain.memory_bytes, own.memory_bytes) == (300 << 20, 1 << 30)
    with pytest.raises(InvalidManifest, match="at least 192Mi"):
        parse.mount_spec(parse.stage(staged(volume_context={**SPEC, MEMORY: "1Mi"})), "/m", settings)


@promise("S-118")
@pytest.mark.parametrize(("field", "text"), [(MEMORY, "64Gi"), (SOURCE, '{"kind": "nfs", "server": "h", "path": "/"}')])
def test_the_author_of_a_pod_chooses_neither_memory_nor_export(field: str, text: str) -> None:
    request = csi.NodePublishVolumeRequest(
        volume_id="csi-1",
        target_path="/k/pods/1/",
        volume_capability=capability(MODES.SINGLE_NODE_WRITER),
        volume_context={"csi.storage.k8s.io/ephemeral": "true", "bucket": "b-1", field: text},
        secrets=KEYS,
    )
    with pytest.raises(InvalidManifest, match="the administrator's"):
        parse.publish(request)
