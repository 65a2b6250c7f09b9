"""What can go wrong in the life of a mount beside datastore.errors."""

from __future__ import annotations

from datastore.errors import DatastoreError


class Unsynced(DatastoreError):
    """Changes are not uploaded; the text names them. They are kept on disk."""
