"""A cluster in which nothing happens by itself, for a reconciler of one object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datastore.api.resources import EVENTS, Resource
from datastore.controller.runtime.client import ApiError, Client


class PlayedClient(Client):
    """own: the object that is reconciled. refusal: why the cluster takes no other new object, or None."""

    def __init__(self, own: Mapping[str, Any], refusal: ApiError | None = None) -> None:
        super().__init__()
        self.own, self.refusal = own, refusal
        self.applied: list[Mapping[str, Any]] = []
        self.made: list[tuple[str, str]] = []
        self.deleted: list[tuple[str, str]] = []
        self.events: list[Mapping[str, Any]] = []

    @property
    def conditions(self) -> dict[str, Mapping[str, Any]]:
        """Those of the object that was last told, by type."""
        return {each["type"]: each for each in self.applied[-1]["status"]["conditions"]}

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        return None

    async def list(
        self, resource: Resource, namespace: str, field_selector: str = "", label_selector: str = ""
    ) -> list[dict[str, Any]]:
        return []

    async def apply(self, body: Mapping[str, Any], subresource: str = "") -> dict[str, Any]:
        if body["kind"] != self.own["kind"]:
            return self._make(body)
        self.applied.append(body)
        return {**self.own, "status": body.get("status", {})}

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if resource is not EVENTS:
            return self._make(body)
        self.events.append(body)
        return dict(body)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> dict[str, Any] | None:
        self.deleted.append((resource.plural, name))
        return None

    def _make(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        self.made.append((body["kind"], body["metadata"]["name"]))
        return {**body, "metadata": {"uid": "made", "creationTimestamp": "2026-01-01T00:00:00Z", **body["metadata"]}}
