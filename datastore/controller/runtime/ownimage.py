"""The image of pods that run this project's code in namespaces of users: the controller's own, unless one is chosen."""

from __future__ import annotations

from typing import NamedTuple

from datastore.api.resources import PODS
from datastore.controller.runtime.client import Client
from datastore.controller.runtime.settings import RuntimeSettings


class Image(NamedTuple):
    """An image and its pull policy."""

    name: str
    pull_policy: str = "IfNotPresent"


class OwnImage:
    """chosen: the image in the settings, '' for that of our own pod, which is looked up once."""

    def __init__(self, client: Client, settings: RuntimeSettings, chosen: str) -> None:
        self._client = client
        self._settings = settings
        self._image = Image(chosen) if chosen else None

    async def get(self) -> Image | None:
        """Return the image; None while our own pod is not found. Errors: ApiError, Unavailable."""
        if self._image is None:
            where = f"metadata.name={self._settings.identity}"
            for pod in await self._client.list(PODS, self._settings.namespace, where):
                container = pod["spec"]["containers"][0]
                self._image = Image(container["image"], container.get("imagePullPolicy", "IfNotPresent"))
        return self._image
