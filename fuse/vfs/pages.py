"""The pages of a directory's listing, asked for one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from ..store.base import ListPage
from .core import Core


def pages(core: Core, prefix: str, first: ListPage | None, *, limit: int | None) -> Iterator[ListPage]:
    """The pages of one level below a prefix, `limit` of them at most. first: the first, if it is known already."""
    token: str | None = None
    for number in count(1):
        page = first if first is not None and number == 1 else core.store.list_page(prefix, delimiter="/", token=token)
        yield page
        token = page.next_token
        if token is None or number == limit:
            return
