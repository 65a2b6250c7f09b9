"""The errors of models, in addition to those in datastore.errors. None of them reaches a mount.

ModelError
 |- InvalidReference    the text names no model, version or alias            (exit code 2)
 |- ModelNotFound       the store has no such model, version or alias
 |- VersionInUse        an alias or a Serving names the version
 |- VersionDamaged      what is stored is not what was saved; the text names the path and both digests
 |   '- FormatUnknown   the manifest is of another release
 |- SourceInvalid       a version can't hold what is to be saved, or it is not there     (exit code 2)
 |- SourceChanged       what is to be saved changed while it was saved
 '- SaveLost            the save was considered dead, or asked to stop
"""

from __future__ import annotations

from datastore.errors import DatastoreError


class ModelError(DatastoreError):
    """The base class of the errors about models and their versions."""


class InvalidReference(ModelError):
    """A text does not name a model, a version or an alias."""


class ModelNotFound(ModelError):
    """The store has no such model, version or alias."""


class VersionInUse(ModelError):
    """The version can't be deleted; the text names the alias that means it, or what serves it."""


class VersionDamaged(ModelError):
    """What is stored is not what was saved; the text names the path, and both digests where they are known."""


class FormatUnknown(VersionDamaged):
    """The manifest has a format that this release can't read: it may be whole, so nothing of the version is removed."""


class SourceInvalid(ModelError):
    """A version can't hold what is to be saved, or nothing is there; the text names the path."""


class SourceChanged(ModelError):
    """What is to be saved changed while it was read; the text names the path."""


class SaveLost(ModelError):
    """The save can't become a version any more: it was considered dead, or asked to stop."""
