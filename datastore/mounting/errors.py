"""The errors of mounting and unmounting that datastore.errors does not have."""

from __future__ import annotations

from datastore.errors import DatastoreError


class Unsynced(DatastoreError):
    """Changes are not uploaded; the text names them, and says whether they are kept on disk, or lost."""
