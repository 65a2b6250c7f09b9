"""A store for callers without an event loop: each call blocks its thread until it is answered."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..loop import Loop, each, now
from .base import Capabilities, ObjectInfo, ObjectStore

T = TypeVar("T")
P = ParamSpec("P")


def _blocks(
    method: Callable[Concatenate[ObjectStore, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[BlockingStore, P], T]:
    """Return a method of ObjectStore as a plain function that waits for the answer."""
    name = method.__name__

    def call(store: BlockingStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        asked: Callable[P, Coroutine[Any, Any, T]] = getattr(store.inner, name)
        return now(asked(*args, **kwargs))

    return call


class BlockingStore:
    """The calls of ObjectStore as plain functions. Any thread but an event loop's may call them."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    list_page = _blocks(ObjectStore.list_page)
    head = _blocks(ObjectStore.head)
    get = _blocks(ObjectStore.get)
    put = _blocks(ObjectStore.put)
    copy = _blocks(ObjectStore.copy)
    delete = _blocks(ObjectStore.delete)
    delete_many = _blocks(ObjectStore.delete_many)
    create_upload = _blocks(ObjectStore.create_upload)
    upload_part = _blocks(ObjectStore.upload_part)
    upload_part_copy = _blocks(ObjectStore.upload_part_copy)
    complete_upload = _blocks(ObjectStore.complete_upload)
    abort_upload = _blocks(ObjectStore.abort_upload)
    pending_uploads = _blocks(ObjectStore.pending_uploads)
    has_object_lock = _blocks(ObjectStore.has_object_lock)
    set_legal_hold = _blocks(ObjectStore.set_legal_hold)

    def heads(self, keys: Sequence[str]) -> list[ObjectInfo]:
        """Return the facts of objects, several of which are requested at once. Errors: those of head()."""
        with closing(Loop()) as loop:
            return loop.run(each(self.inner.head, keys))

    def close(self) -> None:
        self.inner.close()
