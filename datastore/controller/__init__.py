"""The Kubernetes controllers of the project's kinds. kopf and aiohttp are imported only in this package."""
