"""`datastore crd`: the CustomResourceDefinitions that a cluster needs before `kubectl apply` of a Datastore."""

from __future__ import annotations

import sys

from datastore.api import crd


def crd_command() -> None:
    """Print the CustomResourceDefinitions: datastore crd | kubectl apply -f -"""
    sys.stdout.write(crd.text())
