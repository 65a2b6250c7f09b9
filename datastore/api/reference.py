"""docs/reference/datastore.md, generated from the models. `python -m datastore.api.reference FILE` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

from datastore.api.datastore import API_VERSION, KIND, Datastore
from datastore.api.schema import Schema, fields_of, structural

_HEAD = f"""# Datastore

Generated from `datastore/api/datastore.py` by `python -m datastore.api.reference`; do not edit.

One manifest for the laptop (`datastore mount FILE`) and the cluster (`kubectl apply -f FILE`): apiVersion
`{API_VERSION}`, kind `{KIND}`. The smallest one:

```yaml
apiVersion: {API_VERSION}
kind: {KIND}
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
"""
_IMMUTABLE = "Can't be changed later in a cluster."


def text() -> str:
    """The whole page."""
    spec = structural(Datastore)["properties"]["spec"]
    parts = [_HEAD, "## spec", spec["description"], _table("spec", spec)]
    for name, inner in spec["properties"].items():
        if "properties" in inner:
            parts += [f"## spec.{name}", inner["description"], _table(f"spec.{name}", inner)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _table(path: str, schema: Schema) -> str:
    rows = ["| Field | Type | Default | Description |", "|---|---|---|---|"]
    fixed = {rule.get("fieldPath", "").lstrip(".") for rule in schema.get("x-kubernetes-validations", [])} - {
        "capacity"
    }
    for field, inner, required in fields_of(schema):
        if "." in field:
            continue
        default = "required" if required else _default(inner)
        description = inner.get("description", "") + (f" {_IMMUTABLE}" if field in fixed else "")
        rows.append(f"| `{path}.{field}` | {_type(inner)} | {default} | {_cell(description)} |")
    return "\n".join(rows)


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "duration" if "ms" in schema["pattern"] else "size"
    names = {"string": "text", "boolean": "true or false", "object": "mapping", "integer": "whole number"}
    return names[schema["type"]]


def _default(schema: Schema) -> str:
    default = schema.get("default")
    if default is None or default == {}:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _cell(description: str) -> str:
    return description.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text())
