"""Objects of a cluster by the words that kubectl knows, over one connection.

A kubectl takes 150 ms of processor time, a request here one: tests look several times a second for what they wait for.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from datastore.api.resources import PODS, Resource
from datastore.errors import NotFound
from datastore.kubeclient import KubeClient, of_context

Manifest = dict[str, Any]


class ApiReader:
    """One cluster. Errors of every method: DatastoreError, also for a word that no kind has."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._kinds: dict[str, tuple[str, Resource]] = {}

    def get(self, word: str, name: str, namespace: str) -> Manifest | None:
        """The object, or None."""
        return self._client.get(self._kind(word)[1], name, namespace=namespace)

    def items(self, words: str, namespace: str, selector: str) -> list[Manifest]:
        """All objects of the kinds, as 'pods,services', in the namespace or in '' for all of them.

        Each has its kind, as kubectl shows it.
        """
        found: list[Manifest] = []
        for kind, resource in map(self._kind, words.split(",")):
            listed = self._client.list(resource, namespace=namespace, selector=selector)
            found += [{"apiVersion": resource.api_version, "kind": kind, **each} for each in listed]
        return found

    def tail(self, pod: str, lines: int, namespace: str) -> str:
        """The last lines of a pod of one container."""
        return self._client.text(f"{PODS.path(namespace, pod)}/log", [("tailLines", str(lines))])

    def _kind(self, word: str) -> tuple[str, Resource]:
        if word not in self._kinds:  # definitions come and go
            self._kinds = self._served()
        if word not in self._kinds:
            raise NotFound(f"the cluster has no kind {word}")
        return self._kinds[word]

    def _served(self) -> dict[str, tuple[str, Resource]]:
        """Kind and address by each of its words: plural, singular, short, and plural with its group."""
        groups = json.loads(self._client.text("/apis"))["groups"]
        versions = ["v1", *(each["preferredVersion"]["groupVersion"] for each in groups)]
        found: dict[str, tuple[str, Resource]] = {}
        for version in versions:
            core = "/" not in version
            for each in json.loads(self._client.text(f"/{'api' if core else 'apis'}/{version}"))["resources"]:
                plural = each["name"]
                if "/" in plural:  # a subresource
                    continue
                kind = (each["kind"], Resource(version, plural, each["namespaced"]))
                words = {plural, each["singularName"], each["kind"].lower(), *each.get("shortNames", ())}
                for word in words | ({f"{plural}.{version.split('/')[0]}"} if not core else set()):
                    found.setdefault(word, kind)
        return found


def api_reader(kubeconfig: Path) -> ApiReader:
    """Of the cluster that this file names now."""
    return _reader(kubeconfig, kubeconfig.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _reader(kubeconfig: Path, _written_ns: int) -> ApiReader:
    return ApiReader(of_context({"KUBECONFIG": str(kubeconfig)}))
