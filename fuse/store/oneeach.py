"""A call for many objects, made of one call for each."""

from __future__ import annotations

from collections.abc import Sequence

from datastore.errors import StoreError

from .base import HeadSink, ObjectInfo, ObjectStore, Shown
from .limits import check_head_count


def head_each(store: ObjectStore, objects: Sequence[Shown], sink: HeadSink) -> None:
    """head_many() by one head() after the other."""
    check_head_count(objects)
    for number, shown in enumerate(objects):
        try:
            answer: ObjectInfo | StoreError = store.head(shown.key)
        except StoreError as error:
            answer = error
        sink(number, answer)
