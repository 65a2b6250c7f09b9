"""The kinds of objects that a manifest can hold and a cluster knows: the models, names and columns of each."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from datastore.api import datastore, model, trainingjob
from datastore.api.datastore import API_VERSION
from datastore.api.status import DatastoreStatus

_READY = ".status.conditions[?(@.type=='Ready')]"
_AGE = ("Age", "date", ".metadata.creationTimestamp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of object. columns: name, type and JSON path of each column that `kubectl get` prints.

    intro: the beginning of the kind's reference page, below the title.
    """

    name: str
    plural: str
    short_name: str
    model: type[BaseModel]
    spec: type[BaseModel]
    status: type[BaseModel]
    columns: tuple[tuple[str, str, str], ...]
    intro: str
    scales: bool = False
    """Whether `kubectl scale` and other programs may set spec.replicas by the subresource scale."""

    @property
    def module(self) -> str:
        """Path of the source file of the kind's models, relative to the root of the project."""
        return self.model.__module__.replace(".", "/") + ".py"

    @property
    def page(self) -> str:
        """File name of the kind's reference page."""
        return f"{self.name.lower()}.md"


DATASTORE = Kind(
    name=datastore.KIND,
    plural="datastores",
    short_name="dst",
    model=datastore.Datastore,
    spec=datastore.DatastoreSpec,
    status=DatastoreStatus,
    columns=(
        ("Backend", "string", ".status.backend"),
        ("Location", "string", ".status.location"),
        ("Capacity", "string", ".spec.capacity"),
        ("Used", "string", ".status.usage.size"),
        ("Ready", "string", f"{_READY}.status"),
        ("Reason", "string", f"{_READY}.reason"),
        _AGE,
    ),
    intro=f"""One manifest for the laptop (`datastore mount FILE`) and the cluster (`kubectl apply -f FILE`): apiVersion
`{API_VERSION}`, kind `Datastore`. The smallest one:

```yaml
apiVersion: {API_VERSION}
kind: Datastore
metadata:
  name: digits
spec:
  s3:
    bucket: digits
```

With a server of your own, and its keys in a Secret of the same file:

```yaml
spec:
  s3:
    bucket: digits
    endpoint: https://minio.example.org
    credentialsSecret: digits-keys
---
apiVersion: v1
kind: Secret
metadata:
  name: digits-keys
stringData:
  AWS_ACCESS_KEY_ID: ...
  AWS_SECRET_ACCESS_KEY: ...
```

A field that is not listed here is an error. A size is a Kubernetes quantity (`500M`, `10Gi`, or whole bytes), a
duration is `250ms`, `1s`, `5m`, `1h30m`, or whole seconds.

In a cluster, edits reach pods that run. Those of `capacity`, `metadataTTL`, `conflict`, `writeBack`, `uploadLimit` and
`cache.size` apply at once, those of `attributes`, `region`, `forcePathStyle` and `caBundle` after a pause of about a
second. An edit of `readOnly` applies to pods that start afterwards. A laptop reads the
manifest when it mounts.
""",
)
TRAINING_JOB = Kind(
    name=trainingjob.KIND,
    plural="trainingjobs",
    short_name="tj",
    model=trainingjob.TrainingJob,
    spec=trainingjob.TrainingJobSpec,
    status=trainingjob.TrainingJobStatus,
    columns=(
        ("Framework", "string", ".spec.framework"),
        ("Phase", "string", ".status.phase"),
        ("Restarts", "integer", ".status.restarts"),
        ("Freed", "string", ".status.conditions[?(@.type=='ResourcesFreed')].status"),
        ("Message", "string", ".status.message"),
        _AGE,
    ),
    intro=f"""A user's image and command, on one machine or many, with Datastores at the paths that the code expects:
apiVersion `{API_VERSION}`, kind `TrainingJob`. The same file runs on a laptop
(`datastore job submit -f FILE --local`) and in a cluster. The smallest one that trains:

```yaml
apiVersion: {API_VERSION}
kind: TrainingJob
metadata:
  name: digits
spec:
  framework: tensorflow
  image: registry.example.org/digits:1
  command: [python, train.py]
  datastores:
    - name: digits
      path: /data
```

With parameter servers, workers and an evaluator beside the master, which is there without being listed:

```yaml
spec:
  roles:
    ps: {{replicas: 1}}
    worker: {{replicas: 2, gpus: 1}}
    evaluator: {{}}
```

A field that is not listed here is an error.
""",
)
MODEL = Kind(
    name=model.MODEL,
    plural="models",
    short_name="mdl",
    model=model.Model,
    spec=model.ModelSpec,
    status=model.ModelStatus,
    columns=(
        ("Store", "string", ".status.store"),
        ("Newest", "integer", ".status.latestVersion"),
        ("Versions", "integer", ".status.versions"),
        ("Ready", "string", f"{_READY}.status"),
        ("Reason", "string", f"{_READY}.reason"),
        _AGE,
    ),
    intro=f"""A trained model, kept as numbered versions of a directory: apiVersion `{API_VERSION}`, kind `Model`.
The versions are in a Datastore of the same namespace ([MODELS.md](../MODELS.md)).

```yaml
apiVersion: {API_VERSION}
kind: Model
metadata:
  name: digits
spec:
  store: models
  aliases:
    - {{name: prod, version: 7}}
```

When an alias is moved in this object, by `kubectl apply`, by `kubectl patch` or by `datastore model tag digits:8 prod
--cluster`, the Servings with this alias serve the version that it then means.

A field that is not listed here is an error.
""",
)
MODEL_VERSION = Kind(
    name=model.VERSION_KIND,
    plural="modelversions",
    short_name="mv",
    model=model.ModelVersion,
    spec=model.ModelVersionSpec,
    status=model.ModelVersionStatus,
    columns=(
        ("Model", "string", ".spec.model"),
        ("Version", "integer", ".status.version"),
        ("Phase", "string", ".status.phase"),
        ("Progress", "integer", ".status.progress.percent"),
        ("Size", "string", ".status.size"),
        ("Digest", "string", ".status.digest"),
        _AGE,
    ),
    intro=f"""One version of a [Model](model.md): apiVersion `{API_VERSION}`, kind `ModelVersion`. With `from` it
does what `datastore model save` does; with `version` it stands for a version that the store has already. A ModelVersion
never changes.

```yaml
apiVersion: {API_VERSION}
kind: ModelVersion
metadata:
  name: digits-monday
spec:
  model: digits
  from:
    datastore: runs
    path: monday/export
  aliases: [canary]
```

A field that is not listed here is an error.
""",
)
MODEL_EXPORT = Kind(
    name=model.EXPORT,
    plural="modelexports",
    short_name="mx",
    model=model.ModelExport,
    spec=model.ModelExportSpec,
    status=model.ModelExportStatus,
    columns=(
        ("Model", "string", ".spec.model"),
        ("Version", "integer", ".status.version"),
        ("Phase", "string", ".status.phase"),
        ("Progress", "integer", ".status.progress.percent"),
        ("Location", "string", ".status.location"),
        _AGE,
    ),
    intro=f"""A version of a [Model](model.md) that is exported once, into a directory or a file of another Datastore of
the namespace: apiVersion `{API_VERSION}`, kind `ModelExport`. It does what `datastore model export` does, by a Job;
every byte is compared with what was saved, and read again where it was written.

```yaml
apiVersion: {API_VERSION}
kind: ModelExport
metadata:
  name: digits-to-partner
spec:
  model: digits
  alias: prod
  to:
    datastore: partner
    path: models/digits
```

A field that is not listed here is an error.
""",
)
SERVING = Kind(
    name=model.SERVING,
    plural="servings",
    short_name="srv",
    model=model.Serving,
    spec=model.ServingSpec,
    status=model.ServingStatus,
    columns=(
        ("Model", "string", ".spec.model"),
        ("Version", "integer", ".status.version"),
        ("Replicas", "integer", ".status.replicas"),
        ("Answering", "integer", ".status.readyReplicas"),
        ("Endpoint", "string", ".status.endpoint"),
        ("Ready", "string", f"{_READY}.status"),
        _AGE,
    ),
    intro=f"""A version of a [Model](model.md) behind one address: apiVersion `{API_VERSION}`, kind `Serving`.
The version is mounted read-only into every pod; nothing is downloaded.

```yaml
apiVersion: {API_VERSION}
kind: Serving
metadata:
  name: digits
spec:
  model: digits
  alias: prod
  replicas: 2
```

`kubectl scale servings digits --replicas=0` sets `spec.replicas`.

A field that is not listed here is an error.
""",
    scales=True,
)
KINDS = (DATASTORE, TRAINING_JOB, MODEL, MODEL_VERSION, MODEL_EXPORT, SERVING)
