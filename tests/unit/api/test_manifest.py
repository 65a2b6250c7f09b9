"""datastore.api.manifest: what a file may hold, and the one line for each way to be wrong."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from datastore.api.datastore import Datastore
from datastore.api.manifest import MAX_BYTES, Manifest, load, parse
from datastore.errors import InvalidManifest
from tests.promises import promise

CANARY = "CANARYsecretCANARYsecret"
HEAD = "apiVersion: datastore.dev/v1alpha1\nkind: Datastore\nmetadata: {name: digits}\n"
GOOD = HEAD + "spec:\n  s3: {bucket: digits}\n"
SECRET = "apiVersion: v1\nkind: Secret\nmetadata: {name: keys}\n"
NONE = "f.yaml: holds no Datastore (apiVersion: datastore.dev/v1alpha1, kind: Datastore)"
ONE_OF = "spec must have exactly one of s3, nfs, sftp, glusterfs, claim, local, storageClassName; "
WHERE = "f.yaml, document 1 (Datastore digits): "


def only(text: str) -> Datastore:
    return parse(text, "f.yaml").pick()


def complaint(text: str) -> str:
    with pytest.raises(InvalidManifest) as caught:
        parse(text, "f.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def spec(text: str) -> str:
    return f"{HEAD}spec: {text}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{s3: {bukcet: digits}}", "spec.s3.bukcet is not a field; did you mean spec.s3.bucket?"),
        ("{bucket: digits}", "spec.bucket is not a field; did you mean spec.s3.bucket?"),
        ("{s3: {bucket: digits, readOnly: true}}", "spec.s3.readOnly is not a field; did you mean spec.readOnly?"),
        ("{s3: {bucket: digits}, read_only: true}", "spec.read_only is not a field; did you mean spec.readOnly?"),
        ("{local: {path: /a, mode: x}}", "spec.local.mode is not a field; spec.local has path"),
        ("{s3: {}}", "spec.s3.bucket is missing: Name of the bucket"),
        ("{s3: {bucket: }}", "spec.s3.bucket is empty; it must be text"),
        (
            "{s3: {bucket: 5}}",
            "spec.s3.bucket must be text; YAML reads this as a number or a truth value, so put it in quotes",
        ),
        ("{s3: [bucket]}", "spec.s3 must be a mapping of fields, such as {bucket: ...}"),
        (
            "{s3: {bucket: photos/cats}}",
            "spec.s3.bucket must be a bucket's name alone, not 'photos/cats'; a prefix is a field of its own",
        ),
        ("{s3: {bucket: [a]}}", "spec.s3.bucket must be text"),
        ("{s3: {bucket: ab}}", "spec.s3.bucket must have 3 to 63 characters, not 2"),
        (
            "{s3: {bucket: Digits}}",
            "spec.s3.bucket must be lower-case letters, digits, hyphens and single dots, not 'Digits'",
        ),
        ("{s3: {bucket: 10.0.0.1}}", "spec.s3.bucket must not look like an IP address (10.0.0.1)"),
        (
            "{s3: {bucket: digits, prefix: /data}}",
            "spec.s3.prefix must not start with '/': keys don't (write data/, not /data)",
        ),
        ('{s3: {bucket: digits, prefix: "a\\nb"}}', "spec.s3.prefix must not hold control characters"),
        (
            "{s3: {bucket: digits, endpoint: 'localhost:9000'}}",
            "spec.s3.endpoint must be a URL that starts with https:// or http://: write https://HOST[:PORT]",
        ),
        (
            f"{{s3: {{bucket: digits, endpoint: 'https://AKIA:{CANARY}@host'}}}}",
            "spec.s3.endpoint must not hold credentials: write https://HOST[:PORT], and put the keys in a Secret "
            "(credentialsSecret)",
        ),
        (
            "{s3: {bucket: digits, endpoint: 'http://host/digits'}}",
            "spec.s3.endpoint must not hold a path or a query: write https://HOST[:PORT]; the bucket has a field of "
            "its own",
        ),
        (
            "{s3: {bucket: digits, endpoint: 'http://host:99999'}}",
            "spec.s3.endpoint must name a host, and a port from 1 to 65535 if any: write https://HOST[:PORT]",
        ),
        ("{s3: {bucket: digits, region: eu west}}", "spec.s3.region must be a region name such as eu-central-1"),
        (
            f"{{s3: {{bucket: digits, credentialsSecret: {CANARY}}}}}",
            "spec.s3.credentialsSecret must be the name of a Secret (lower-case letters, digits, '-' and '.')",
        ),
        (f"{{s3: {{bucket: digits, credentialsSecret: {{k: {CANARY}}}}}}}", "spec.s3.credentialsSecret must be text"),
        (
            "{s3: {bucket: digits, caBundle: my-ca}}",
            "spec.s3.caBundle must be PEM text that holds -----BEGIN CERTIFICATE-----",
        ),
        (
            f"{{s3: {{bucket: digits, caBundle: {'A' * 65537}}}}}",
            "spec.s3.caBundle must have at most 65536 bytes: only those of the server's authority",
        ),
        ("{}", ONE_OF + "this has none"),
        ("{s3: {bucket: digits}, local: {path: /a}}", ONE_OF + "this has s3 and local"),
        ("{claim: {}}", "spec.claim must have exactly one of name, storageClassName"),
        ("{local: {path: data}}", "spec.local.path must be an absolute path"),
        ("{local: {path: /a/../b}}", "spec.local.path must not hold '..'"),
        ("{nfs: {server: h}}", "spec.nfs must have both of server and path, or none of them"),
        (
            "{sftp: {host: h, path: /a, knownHosts: x}}",
            "spec.sftp.knownHosts must be lines of a known_hosts file: HOST TYPE KEY (ssh-keyscan HOST prints them)",
        ),
        (
            "{nfs: {server: ' ', path: /a}}",
            "spec.nfs.server must be a host name or an address, without a scheme, a user, a port or a path",
        ),
        ("{glusterfs: {servers: gfs1, volume: v}}", "spec.glusterfs.servers must be a list, such as [a, b]"),
        ("{glusterfs: {servers: [], volume: v}}", "spec.glusterfs.servers must have at least 1 item, not 0"),
        ('{readOnly: "true", local: {path: /a}}', "spec.readOnly must be true or false, without quotes"),
        (
            "{capacity: 10GB, local: {path: /a}}",
            "spec.capacity must be a quantity such as 500M, 10Gi or a whole number of bytes, not '10GB'",
        ),
        (
            "{capacity: 1.5, local: {path: /a}}",
            "spec.capacity must be a quantity such as 500M, 10Gi or a whole number of bytes",
        ),
        ("{cache: {size: 0}, local: {path: /a}}", "spec.cache.size must be more than 0"),
        (
            "{reclaimPolicy: delete, local: {path: /a}}",
            "spec.reclaimPolicy must be 'Retain', 'Delete' or 'Archive', not 'delete'",
        ),
        (
            "{metadataTTL: 1d, local: {path: /a}}",
            "spec.metadataTTL must be a duration such as 250ms, 1s, 5m or 1h30m, not '1d'",
        ),
        (
            "{metadataTTL: 0.5, local: {path: /a}}",
            "spec.metadataTTL must be a duration such as 250ms, 1s, 5m, 1h30m, or whole seconds",
        ),
        ("{writeBack: {maxDelay: 25h}, local: {path: /a}}", "spec.writeBack.maxDelay must be at most 24h"),
        (
            "{uploadLimit: 100Ki, s3: {bucket: digits}}",
            "spec.uploadLimit must be at least 512Ki; leave it out for no limit",
        ),
        ("{uploadLimit: 1Mi, nfs: {}}", "spec must have uploadLimit only with s3"),
        ("{conflict: fail, nfs: {server: h, path: /a}}", "spec must have conflict: fail only with s3"),
        ("{conflict: fail, sftp: {host: h, path: /a}}", "spec must have conflict: fail only with s3"),
        ("{writeBack: {}, glusterfs: {servers: [h], volume: v}}", "spec must have writeBack only with s3"),
        ("{writeBack: {}, local: {path: /a}}", "spec must have writeBack only with s3"),
        ("{metadataTTL: 25h, local: {path: /a}}", "spec.metadataTTL must be at most 24h"),
        ("{1: 2}", "spec[1] must have text as names of its fields"),
    ],
)
def test_a_wrong_spec_gives_one_clear_line(text: str, words: str) -> None:
    told = complaint(spec(text))
    assert told == WHERE + words
    assert CANARY not in told


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (HEAD + "specs: {}\n", WHERE + "specs is not a field; did you mean spec?"),
        (GOOD.replace("v1alpha1", "v1"), WHERE + "apiVersion must be datastore.dev/v1alpha1, not 'datastore.dev/v1'"),
        (
            GOOD.replace("kind: Datastore", "kind: datastore"),
            "f.yaml, document 1 (datastore digits): kind must be Datastore, not 'datastore'",
        ),
        (
            GOOD.replace("kind: Datastore\n", ""),
            "f.yaml, document 1 (no kind digits): kind is missing; a Datastore has kind: Datastore",
        ),
        (
            GOOD.replace("digits}\nspec", "My_digits}\nspec"),
            "f.yaml, document 1 (Datastore My_digits): metadata.name must be a Kubernetes name (lower-case letters, "
            "digits, '-' and '.'), not 'My_digits'",
        ),
        (
            GOOD.replace("metadata: {name: digits}\n", ""),
            "f.yaml, document 1: metadata is missing: Name, namespace, labels and annotations",
        ),
        (
            f"{GOOD}---\n{GOOD}",
            "f.yaml, document 2 (Datastore digits): metadata.name 'digits' is taken by another Datastore of this file",
        ),
        (f"{GOOD}---\n- a\n", "f.yaml, document 2: must be a mapping: apiVersion, kind, ..."),
        (GOOD + "  s3: {}\n", "f.yaml, line 6, column 3: not valid YAML: the field 's3' is there twice"),
        ("a: [", "f.yaml, line 1, column 5: not valid YAML: expected the node content, but found '<stream end>'"),
        ("a: \x01", "f.yaml: not valid YAML: it holds a character or a value that YAML refuses"),
        ("{" * 5000, "f.yaml: not a manifest: nested too deeply"),
        ("", NONE),
        ("apiVersion: v1\nkind: Pod\n", NONE),
        (
            f"{GOOD}---\n{SECRET}data: {{AWS_ACCESS_KEY_ID: '{CANARY}!'}}\n",
            "f.yaml, document 2 (Secret keys): data.AWS_ACCESS_KEY_ID of the Secret is not base64 of text; plain text "
            "goes into stringData",
        ),
        (
            f"{GOOD}---\n{SECRET}stringData: {{AWS_ACCESS_KEY_ID: 5}}\n",
            "f.yaml, document 2 (Secret keys): stringData.AWS_ACCESS_KEY_ID of the Secret must be text; put it "
            "in quotes",
        ),
        (
            f"{GOOD}---\n{SECRET}stringData: {CANARY}\n",
            "f.yaml, document 2 (Secret keys): stringData of the Secret must be a mapping of names to text",
        ),
        (
            f"{GOOD}---\napiVersion: v1\nkind: Secret\nstringData: {{a: {CANARY}}}\n",
            "f.yaml, document 2: metadata.name of the Secret is missing",
        ),
    ],
)
def test_a_wrong_manifest_gives_one_clear_line(text: str, line: str) -> None:
    told = complaint(text)
    assert told == line
    assert CANARY not in told


def test_a_small_manifest_gets_all_defaults() -> None:
    datastore = only(GOOD)
    assert datastore.location == "s3://digits/"
    assert (datastore.attributes, datastore.metadata_ttl_s) == ("full", 1.0)
    assert datastore.spec.reclaim_policy == "Retain"
    assert datastore.spec.cache.size == 10 << 30
    assert datastore.metadata.namespace == "default"


def test_a_read_only_datastore_has_other_defaults() -> None:
    datastore = only(spec("{readOnly: true, s3: {bucket: digits}}"))
    assert (datastore.attributes, datastore.metadata_ttl_s) == ("listing", 60.0)


def test_given_values_override_the_defaults() -> None:
    datastore = only(spec("{readOnly: true, attributes: full, metadataTTL: 250ms, s3: {bucket: digits}}"))
    assert (datastore.attributes, datastore.metadata_ttl_s) == ("full", 0.25)


@pytest.mark.parametrize(("given", "kept"), [("", ""), ("a", "a/"), ("a/", "a/"), ("a//b", "a//b/"), ("Ä ö", "Ä ö/")])
def test_a_prefix_gets_a_slash_at_its_end_and_is_kept_otherwise(given: str, kept: str) -> None:
    found = only(spec(f"{{s3: {{bucket: digits, prefix: '{given}'}}}}"))
    assert found.spec.s3 is not None
    assert found.spec.s3.prefix == kept


@pytest.mark.parametrize(
    "endpoint", ["https://s3.example.org", "http://127.0.0.1:9000/", "http://[::1]:9000", "http://minio"]
)
def test_endpoints_of_all_kinds_are_taken(endpoint: str) -> None:
    found = only(spec(f"{{s3: {{bucket: digits, endpoint: '{endpoint}'}}}}"))
    assert found.spec.s3 is not None
    assert found.spec.s3.endpoint == endpoint.removesuffix("/")


@pytest.mark.parametrize(
    ("backend", "location"),
    [
        ("nfs: {server: a, path: /b}", "nfs://a/b"),
        ("nfs: {}", "nfs: an export of its own"),
        ("sftp: {host: h, path: /b}", "sftp://h/b"),
        ("sftp: {host: h, path: /b, port: 2022}", "sftp://h:2022/b"),
        ("sftp: {host: '::1', path: /b, port: 2022}", "sftp://[::1]:2022/b"),
        ("glusterfs: {servers: [a, c], volume: b}", "glusterfs://a/b"),
        ("claim: {name: a}", "claim:a"),
        ("claim: {storageClassName: a}", "storageclass:a"),
        ("local: {path: /a}", "local:/a"),
    ],
)
def test_every_backend_has_a_location(backend: str, location: str) -> None:
    assert only(spec(f"{{{backend}}}")).location == location


@promise("S-306")
@pytest.mark.parametrize(
    "part",
    [
        "servers: ['-n']",
        "servers: ['a,b']",
        "servers: ['a b']",
        "servers: ['a/b']",
        "servers: []",
        "volume: '-v'",
        "volume: 'a,b'",
        "volume: 'a b'",
        "volume: ../v",
        "path: a",
        "path: -a",
        "path: /a/../b",
        "path: '/a b'",
        "path: '/a,auth.allow=*'",
        'path: "/a\\nb"',
        "path: '/a\"b'",
        "path: '/$(id)'",
    ],
)
def test_values_that_could_be_options_of_the_glusterfs_client_are_refused(part: str) -> None:
    given = {"servers": "servers: [a]", "volume": "volume: v", "path": "path: /", part.partition(":")[0]: part}
    with pytest.raises(InvalidManifest, match=part.partition(":")[0]):
        only(spec(f"{{glusterfs: {{{', '.join(given.values())}}}}}"))


def test_objects_of_other_kinds_are_ignored() -> None:
    text = f"apiVersion: batch/v1\nkind: Job\nspec: {{a: 1}}\n---\n---\n{GOOD}---\napiVersion: x/v1\nkind: Datastore\n"
    assert only(text).name == "digits"


def test_the_output_of_kubectl_get_is_a_manifest() -> None:
    inner = "".join(f"  {line}\n" for line in GOOD.splitlines()).replace("  apiVersion", "- apiVersion", 1)
    text = f"apiVersion: v1\nkind: List\nitems:\n{inner}  status: {{phase: Ready}}\n"
    text = text.replace("{name: digits}", "{name: digits, uid: x, creationTimestamp: 2026-01-01T00:00:00Z}")
    assert only(text).name == "digits"


def test_a_date_stays_text() -> None:
    assert only(GOOD.replace("digits}\nspec", "2026-01-02}\nspec")).name == "2026-01-02"


def test_a_name_is_needed_only_if_the_file_has_several_datastores() -> None:
    manifest = parse(f"{GOOD}---\n{GOOD.replace('digits', 'output')}", "f.yaml")
    assert manifest.pick("output").name == "output"
    for name, text in [
        (None, "f.yaml holds several Datastores, name one: digits, output"),
        ("outpux", "f.yaml holds no Datastore 'outpux'; did you mean output?"),
        ("zzz", "f.yaml holds no Datastore 'zzz'; it holds digits, output"),
    ]:
        with pytest.raises(InvalidManifest, match=f"^{text.replace('?', '[?]')}$"):
            manifest.pick(name)


def test_the_same_name_in_two_namespaces_is_ambiguous() -> None:
    manifest = parse(f"{GOOD}---\n{GOOD.replace('name: digits', 'name: digits, namespace: b')}", "f.yaml")
    with pytest.raises(InvalidManifest, match="in several namespaces"):
        manifest.pick("digits")


def test_secrets_are_read_from_both_forms_and_hidden() -> None:
    encoded = base64.b64encode(CANARY.encode()).decode()
    manifest = parse(f"{GOOD}---\n{SECRET}data: {{a: {encoded}, b: {encoded}}}\nstringData: {{b: plain}}\n", "f.yaml")
    values = manifest.secrets[0].values
    assert (values["a"].reveal(), values["b"].reveal()) == (CANARY, "plain")
    assert CANARY not in repr(manifest)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xff\xfe", "is not UTF-8 text, so it is no manifest"),
        (b" " * (MAX_BYTES + 1), "is over 4 MiB, so it is no manifest"),
        (None, "can't be read: No such file or directory"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tmp_path / "f.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidManifest) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {text}"


def test_an_address_in_place_of_a_file_is_told_which_manifest_to_write() -> None:
    with pytest.raises(InvalidManifest) as caught:
        load("s3://photos/cats/")
    told = str(caught.value)
    manifest = parse(told[told.index("{apiVersion") :], "the advice")
    wanted = manifest.pick().spec.s3
    assert wanted is not None
    assert (wanted.bucket, wanted.prefix) == ("photos", "cats/")


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load(path).pick().name == "digits"


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("latin-1")))
def test_any_text_is_a_manifest_or_one_line(text: str) -> None:
    try:
        assert isinstance(parse(text, "f.yaml"), Manifest)
    except InvalidManifest as error:
        told = str(error)
        assert "\n" not in told


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_TREES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_SCALARS, inner, max_size=3)
)


@given(
    st.dictionaries(st.sampled_from(["s3", "nfs", "local", "claim", "cache", "capacity", "metadataTTL", "x"]), _TREES)
)
def test_any_spec_is_taken_or_refused_in_one_line(tree: object) -> None:
    document = {"apiVersion": "datastore.dev/v1alpha1", "kind": "Datastore", "metadata": {"name": "a"}, "spec": tree}
    try:
        parse(yaml.safe_dump(document), "f.yaml")
    except InvalidManifest as error:
        told = str(error)
        assert "\n" not in told


@promise("S-47", "S-48")
def test_each_way_to_choose_write_back_and_conflict_is_parsed() -> None:
    """Both are off by default."""
    plain = only(spec("{s3: {bucket: digits}}")).spec
    assert (plain.conflict, plain.write_back) == ("lastWriterWins", None)
    chosen = only(spec("{conflict: fail, writeBack: {}, s3: {bucket: digits}}")).spec
    assert chosen.conflict == "fail"
    assert chosen.write_back is not None
    assert chosen.write_back.max_delay == 5.0
    short = only(spec("{writeBack: {maxDelay: 250ms}, s3: {bucket: digits}}")).spec
    assert short.write_back is not None
    assert short.write_back.max_delay == 0.25
