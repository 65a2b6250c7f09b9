"""datastore.api.trainingjob: valid TrainingJobs, and one line for each mistake (S-320, S-321)."""

from __future__ import annotations

import pytest

from datastore.api.datastore import Datastore
from datastore.api.manifest import Manifest, parse
from datastore.api.trainingjob import KIND, TrainingJob, replicas_of
from datastore.errors import InvalidManifest
from tests.promises import promise

HEAD = "apiVersion: datastore.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: digits}\n"
WHERE = "f.yaml, document 1 (TrainingJob digits): "


def read(text: str) -> Manifest:
    return parse(text, "f.yaml", KIND)


def job(spec: str, head: str = HEAD) -> TrainingJob:
    return read(f"{head}spec: {{framework: tensorflow, command: [python, train.py], {spec}}}\n").pick_job()


def complaint(text: str) -> str:
    with pytest.raises(InvalidManifest) as caught:
        read(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@promise("S-320")
def test_one_file_holds_jobs_datastores_and_secrets() -> None:
    rest = (
        "---\napiVersion: datastore.dev/v1alpha1\nkind: Datastore\nmetadata: {name: data}\nspec: {local: {path: /d}}\n"
        "---\napiVersion: v1\nkind: Secret\nmetadata: {name: keys}\nstringData: {a: b}\n"
        "---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: other}\n"
    )
    found = read(f"{HEAD}spec: {{framework: none, command: [true]}}\n".replace("[true]", "['true']") + rest)
    assert [each.name for each in found.jobs] == ["digits"]
    assert isinstance(found.pick("data"), Datastore)
    assert [each.name for each in found.secrets] == ["keys"]


WRONG = [
    (
        "datastores: [{name: x, Path: /a}]",
        "spec.datastores[0].Path is not a field; did you mean spec.datastores[0].path?",
    ),
    (
        "datastores: [{name: x}]",
        "spec.datastores[0].path is missing: Absolute path at which the processes see the Datastore; two Datastores "
        "can't have the same",
    ),
    ("datastores: [{name: x, path: /a}, {name: y, path: /a/}]", "spec mounts two Datastores at /a: x and y"),
    ("datastores: [{name: x, path: /}]", "spec mounts Datastore x at /; choose a directory below it"),
    (
        "datastores: [{name: x, path: /a, subPath: ../b}]",
        "spec.datastores[0].subPath must be a path below the Datastore: without '/' at its start, and without '..'",
    ),
    ("gpus: 8", "spec must have both or neither of gpus (in all) and gpusPerTask"),
    (
        "gpus: 8, gpusPerTask: 4, roles: {worker: {replicas: 3}}",
        "spec has gpus and gpusPerTask, which say how many workers there are and what each gets: leave "
        "out roles.worker.replicas and the gpus of master and worker",
    ),
    ("roles: {master: {replicas: 2}}", "spec has roles.master.replicas 2: there is one master at most"),
    ("roles: {evaluator: {replicas: 2}}", "spec has roles.evaluator.replicas 2: there is one evaluator at most"),
    ("roles: {master: {replicas: 0}}", "spec has neither a master nor a worker: nothing would run"),
    ("logs: {datastore: x}", "spec has logs.datastore x, which is not one of spec.datastores"),
    (
        "logs: {datastore: x}, datastores: [{name: x, path: /a, readOnly: true}]",
        "spec has logs.datastore x, which is not one of spec.datastores that are not readOnly",
    ),
    ("schedule: '0 3 * *'", "spec.schedule must be five fields: minute hour day month weekday, such as '0 3 * * 1'"),
    (
        "env: [{name: A, value: b, valueFrom: {fieldRef: {fieldPath: x}}}]",
        "spec.env[0] must not have both value and valueFrom",
    ),
    ("env: [{name: 1A}]", "spec.env[0].name must be the name of a variable"),
    ("backoffLimit: -1", "spec.backoffLimit must be greater than or equal to 0"),
    ("roles: {worker: {replicas: 2.5}}", "must be a whole number"),
    (
        "resources: {limits: {cpu: much}}",
        "spec.resources.limits.cpu must be a quantity such as 500M, 10Gi or a whole number of bytes, not 'much'",
    ),
]
"""What is wrong beside a framework and a command."""


@promise("S-320")
@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (
            "{framework: tensorflw, command: [a]}",
            "spec.framework must be 'tensorflow', 'pytorch', 'jax', 'mxnet', 'mpi' or 'none', not 'tensorflw'",
        ),
        (
            "{command: [a], roles: {worker: {}}}",
            "spec has no framework: with several processes it says what they are told about each other",
        ),
        ("{command: [a], gpus: 16, gpusPerTask: 8}", "spec has no framework: with several processes"),
        (
            "{command: [a], datastores: [{name: x, path: data}]}",
            "spec.datastores[0].path must be an absolute path, as the job sees it, such as /data; not 'data'",
        ),
        ("{command: [a], save: {model: m, from: out}}", "spec.save.from must be an absolute path, as the job sees it"),
        ("{framework: none, Command: [a]}", "spec.Command is not a field; did you mean spec.command?"),
        ("{framework: none}", "spec has neither a command nor an image for master"),
        *(("{framework: none, command: [a], " + rest + "}", line) for rest, line in WRONG),
    ],
)
def test_each_wrong_field_is_reported_in_one_line(spec: str, line: str) -> None:
    said = complaint(f"{HEAD}spec: {spec}\n")
    assert said.startswith(WHERE)
    assert line in said


@promise("S-320")
@pytest.mark.parametrize("name", ["a.b", "A", "-a", "a" * 52])
def test_a_name_must_fit_into_host_names(name: str) -> None:
    said = complaint(f"{HEAD}spec: {{framework: none, command: [a]}}\n".replace("digits", name))
    assert "metadata.name must have at most 51 lower-case letters, digits and '-', for it names hosts" in said


@promise("S-320")
def test_the_name_of_a_scheduled_job_leaves_room_for_times() -> None:
    text = f"{HEAD}spec: {{framework: none, command: [a], schedule: '0 3 * * 1'}}\n"
    assert "must have at most 40 letters, its runs add a time" in complaint(text.replace("digits", "a" * 41))


@promise("S-320")
def test_a_kind_almost_right_is_no_other_kind() -> None:
    text = f"{HEAD}spec: {{framework: none, command: [a]}}\n"
    assert "kind must be TrainingJob, not 'TrainJob'" in complaint(text.replace("TrainingJob", "TrainJob"))
    assert "holds no TrainingJob" in complaint("apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n")


@promise("S-321")
@pytest.mark.parametrize(
    ("spec", "counts"),
    [
        ("", (1, 0, 0, 0)),
        ("roles: {ps: {replicas: 0}, worker: {replicas: 0}}", (1, 0, 0, 0)),
        ("roles: {worker: {replicas: 2}, ps: {}, evaluator: {}}", (1, 1, 2, 1)),
        ("roles: {master: {replicas: 0}, worker: {replicas: 2}}", (0, 0, 2, 0)),
        ("gpus: 100, gpusPerTask: 8", (1, 0, 12, 0)),
        ("gpus: 100, gpusPerTask: 8, roles: {master: {replicas: 0}}", (0, 0, 13, 0)),
        ("gpus: 8, gpusPerTask: 8", (1, 0, 0, 0)),
    ],
)
def test_how_many_replicas_a_role_has(spec: str, counts: tuple[int, ...]) -> None:
    found = job(spec).spec
    assert tuple(replicas_of(found, role) for role in ("master", "ps", "worker", "evaluator")) == counts
