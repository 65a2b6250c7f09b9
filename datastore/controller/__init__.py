"""The controller: keeps what the cluster holds in step with every Datastore. kopf and aiohttp live here only."""
