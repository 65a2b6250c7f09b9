"""The pages of a directory's listing: asked for one after the other, or all at once when they are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from ..store.base import ListPage
from .core import Core
from .listing import Seen


def pages(core: Core, prefix: str, first: ListPage | None, *, limit: int | None) -> Iterator[ListPage]:
    """The pages of one level below a prefix, `limit` of them at most. first: the first, if it is known already."""
    token: str | None = None
    for number in count(1):
        page = first if first is not None and number == 1 else core.store.list_page(prefix, delimiter="/", token=token)
        yield page
        token = page.next_token
        if token is None or number == limit:
            return


def again(core: Core, prefix: str, known: Sequence[Seen]) -> tuple[bool, ListPage | None]:
    """Ask for known pages once more, side by side: whether all are the same, and the first if that says more.

    What has changed in a listing of several pages has moved their limits: such a one is read anew from its beginning.
    """
    if not known:
        return False, None

    def ask(seen: Seen) -> ListPage:
        return core.store.list_page(prefix, delimiter="/", start_after=seen.start_after, unless=seen.digest)

    answers = [ask(known[0])] if len(known) == 1 else core.each(ask, known)
    same = all(page.digest == seen.digest for page, seen in zip(answers, known, strict=True))
    return same, None if same or len(known) > 1 else answers[0]
