"""What can go wrong with models beside datastore.errors. None of these reaches a mount.

ModelError
 |- InvalidReference    no name of a model, version or alias                 (exit code 2)
 |- ModelNotFound       no such model, version or alias
 |- VersionInUse        an alias or a Serving names it
 |- VersionDamaged      what is stored is not what was saved: names the path and both digests
 |- SourceInvalid       what is to be saved can't be held by a version
 |- SourceChanged       it changed while it was saved
 '- SaveLost            the save was taken for dead, or asked to stop
"""

from __future__ import annotations

from datastore.errors import DatastoreError


class ModelError(DatastoreError):
    """About models and their versions."""


class InvalidReference(ModelError):
    """A text does not name a model, a version or an alias."""


class ModelNotFound(ModelError):
    """The store has no such model, version or alias."""


class VersionInUse(ModelError):
    """The version can't be deleted: the text names the alias or the Serving."""


class VersionDamaged(ModelError):
    """What is stored is not what was saved; the text names the path, and both digests where they are known."""


class SourceInvalid(ModelError):
    """A version can't hold what is to be saved; the text names the path."""


class SourceChanged(ModelError):
    """What is to be saved changed meanwhile; the text names the path."""


class SaveLost(ModelError):
    """The save can't become a version any more."""
