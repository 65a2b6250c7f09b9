"""datastore.training.convert: jobs of Kubeflow as TrainingJobs (S-336)."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from datastore.api.manifest import Manifest, parse
from datastore.api.trainingjob import KIND
from datastore.errors import InvalidManifest
from datastore.training.convert import Converted, convert
from datastore.training.topology import tasks_of
from tests.promises import promise

TF = """
apiVersion: kubeflow.org/v1
kind: TFJob
metadata: {name: mnist, namespace: team}
spec:
  runPolicy: {backoffLimit: 3, ttlSecondsAfterFinished: 60, cleanPodPolicy: None, schedulingPolicy: {queue: gold}}
  tfReplicaSpecs:
    Chief: &role
      replicas: 1
      restartPolicy: ExitCode
      template:
        spec:
          nodeSelector: {disk: fast}
          containers:
            - name: tensorflow
              image: mnist:1
              command: [python, train.py]
              env: [{name: A, value: b}]
              resources: {limits: {cpu: 2, nvidia.com/gpu: 1}}
              volumeMounts:
                - {name: data, mountPath: /data, subPath: digits, readOnly: true}
                - {name: tmp, mountPath: /t}
          volumes:
            - {name: data, persistentVolumeClaim: {claimName: mnist-data}}
            - {name: tmp, emptyDir: {}}
    PS: {replicas: 2, template: {spec: {containers: [{name: tensorflow, image: mnist:1, command: [python, train.py]}]}}}
    Worker:
      <<: *role
      replicas: 4
"""
TORCH = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: bert}
spec:
  nprocPerNode: "4"
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: OnFailure
      template:
        spec:
          initContainers: [{}]
          containers: [{name: pytorch, image: bert:1, command: [torchrun, train.py]}]
"""
MPI = """
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata: {name: horovod}
spec:
  slotsPerWorker: 2
  runPolicy: {suspend: true}
  mpiReplicaSpecs:
    Launcher: {template: {spec: {containers: [{image: hvd:1, command: [mpirun, python, train.py]}]}}}
    Worker:
      replicas: 3
      template: {spec: {containers: [{image: hvd:1, resources: {limits: {nvidia.com/gpu: 2}}}]}}
"""
TRAIN = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: llm}
spec:
  runtimeRef: {name: torch-distributed}
  suspend: true
  initializer:
    dataset: {storageUri: s3://corpora/wiki, secretRef: {name: keys}}
    model: {storageUri: hf://some/model}
  trainer:
    image: llm:1
    command: [torchrun, train.py]
    numNodes: 3
    numProcPerNode: 4
    resourcesPerNode: {limits: {nvidia.com/gpu: 8, memory: 64Gi}}
"""


def made(text: str) -> tuple[Converted, Manifest]:
    """What comes out, and that it is a good manifest."""
    converted = convert(yaml.safe_load(text))
    return converted, parse(yaml.safe_dump_all(converted.documents), "made", KIND)


def spec(text: str) -> dict[str, Any]:
    found: dict[str, Any] = made(text)[0].documents[0]["spec"]
    return found


@promise("S-336")
def test_a_tfjob() -> None:
    converted, manifest = made(TF)
    job = manifest.pick_job()
    assert (job.name, job.namespace, job.spec.framework) == ("mnist", "team", "tensorflow")
    assert [(task.name, task.gpus) for task in tasks_of(job.spec)] == [
        ("master-0", 1),
        *((f"ps-{index}", 0) for index in range(2)),
        *((f"worker-{index}", 1) for index in range(4)),
    ]
    assert (job.spec.command, job.spec.image, job.spec.backoff_limit) == (["python", "train.py"], "mnist:1", 3)
    assert job.spec.template is not None
    assert job.spec.template.labels == {"kueue.x-k8s.io/queue-name": "gold"}
    (mounted,) = job.spec.datastores
    assert (mounted.name, mounted.path, mounted.sub_path, mounted.read_only) == ("mnist-data", "/data", "digits", True)
    datastore = manifest.pick("mnist-data")
    assert datastore.spec.claim is not None
    assert (datastore.spec.claim.name, datastore.metadata.namespace) == ("mnist-data", "team")
    worker = job.spec.roles.worker
    assert worker is not None
    assert worker.template is not None
    assert worker.template.volumes == [{"name": "tmp", "emptyDir": {}}]
    assert worker.template.node_selector == {"disk": "fast"}
    assert any("cleanPodPolicy" in each for each in converted.notes)


@promise("S-336")
def test_a_pytorchjob_without_a_master() -> None:
    converted, manifest = made(TORCH)
    assert [task.name for task in tasks_of(manifest.pick_job().spec)] == ["worker-0", "worker-1"]
    for word in ("initContainers", "restartPolicy OnFailure", "nprocPerNode"):
        assert any(word in each for each in converted.notes), word


@promise("S-336")
def test_an_mpijob_whose_launcher_takes_part() -> None:
    converted, manifest = made(MPI)
    job = manifest.pick_job()
    assert [(task.name, task.gpus) for task in tasks_of(job.spec)] == [
        ("master-0", 2),
        ("worker-0", 2),
        ("worker-1", 2),
    ]
    assert (job.spec.command, job.spec.suspend) == (["mpirun", "python", "train.py"], True)
    assert any("one worker less" in each for each in converted.notes)


@promise("S-336")
def test_a_trainjob_and_its_initializers() -> None:
    converted, manifest = made(TRAIN)
    job = manifest.pick_job()
    assert (job.spec.framework, job.spec.suspend) == ("pytorch", True)
    assert [(task.name, task.gpus) for task in tasks_of(job.spec)] == [
        ("master-0", 8),
        ("worker-0", 8),
        ("worker-1", 8),
    ]
    assert [(each.name, each.path) for each in job.spec.datastores] == [("dataset", "/workspace/dataset")]
    s3 = manifest.pick("dataset").spec.s3
    assert s3 is not None
    assert (s3.bucket, s3.prefix, s3.credentials_secret) == ("corpora", "wiki/", "keys")
    assert any("hf://some/model" in each for each in converted.notes)
    assert any("numProcPerNode 4" in each for each in converted.notes)


@promise("S-336")
def test_another_kind_is_refused() -> None:
    with pytest.raises(InvalidManifest, match="kind 'Pod' can't be converted; TFJob, PyTorchJob, MPIJob, TrainJob can"):
        convert({"kind": "Pod", "spec": {}})
