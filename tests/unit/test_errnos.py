"""The errno table is total, and says what an application can act upon."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from datastore import errors
from datastore.errors import DatastoreError
from datastore.fuse.errnos import errno_of


def every_class(base: type[DatastoreError] = DatastoreError) -> Iterator[type[DatastoreError]]:
    yield base
    for derived in base.__subclasses__():
        yield from every_class(derived)


def test_every_error_of_the_tree_has_a_number() -> None:
    for kind in every_class():
        if kind.__module__ == errors.__name__:
            assert errno_of(kind("words")) in errno.errorcode, kind


def test_a_class_unknown_to_the_table_takes_its_nearest_bases_number() -> None:
    class Stranger(errors.AccessDenied):
        pass

    assert errno_of(Stranger("words")) == errno.EACCES


def test_an_oserror_keeps_its_number_and_a_defect_has_none() -> None:
    assert errno_of(FileExistsError(errno.EEXIST, "x")) == errno.EEXIST
    assert errno_of(OSError("no number")) == errno.EIO
    assert errno_of(ValueError("a defect")) is None
