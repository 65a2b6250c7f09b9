"""W1 to W9: what each workload does, on a directory and with the plain client."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bench.bars import READ_ONLY, WRITE_BACK
from bench.bucket import Arrival, NotInS3
from bench.cell import BIG, FLAT, MB, SMALL, TREE, Answer, Cell, Group
from bench.metrics import META_OPERATIONS, METRICS
from bench.payload import WrongContent
from bench.sizes import KIB, Sizes

MANY = 16
STREAMS = 4
RANDOM = {"W4.random_4k": 4 * KIB, "W4.random_128k": 128 * KIB}
THREADS = {"one": 1, "sixteen": MANY}
TINY_SIZE = 256
LATE_S = 10.0
"""The most seconds to wait until a metadata change is in S3, before the next kind of call begins."""


def tree_prefixes(sizes: Sizes) -> dict[str, int]:
    """Return how many of the prepared very small objects, which the walks visit, are below each prefix."""
    return {
        **{f"{TREE}/d{number:03}": sizes.tree_files for number in range(sizes.tree_folders)},
        FLAT: sizes.flat_files,
    }


# -- W1, W2: sequential reads


def read_twice(cell: Cell) -> None:
    """Read the large file cold, and again."""
    size = cell.sizes.big
    with cell.opened() as mount:
        for metric in ("W1.read", "W2.read"):
            path = str(mount.root / BIG)
            cell.rate(metric, cell.work("filework.read_sequential", path=path, size=size, cap_s=cell.sizes.cap_s))


def native_read(cell: Cell) -> None:
    """Download the large object into a file."""
    with cell.opened() as place:
        path = str(place.root / "got")
        cell.rate("W1.read", cell.native_work("get_to_file", key=BIG, size=cell.sizes.big, path=path))


# -- W3: sequential write


def write_big(cell: Cell) -> None:
    """Write a large file until fsync and close have returned and the object is in S3."""
    with cell.opened() as mount:
        path = str(mount.root / cell.tag / BIG)
        answer = cell.work("filework.write_sequential", path=path, size=cell.sizes.big)
        _big_arrived(cell, answer)


def native_write(cell: Cell) -> None:
    """Upload a large object with a multipart upload."""
    with cell.opened():
        _big_arrived(cell, cell.native_work("put_multipart", key=f"{cell.tag}/{BIG}", size=cell.sizes.big))


def _big_arrived(cell: Cell, answer: Answer) -> None:
    size = cell.sizes.big
    arrival = _wait(cell, lambda: cell.bench.bucket.sizes(f"{cell.tag}/").get(BIG) == size, answer["closed"])
    if cell.subject.remote:
        _right(lambda: cell.bench.bucket.check_big(f"{cell.tag}/{BIG}", size))
    cell.record("W3.write", size / MB / (arrival.at - answer["began"]), late=arrival.late)
    if not arrival.late:
        cell.processor("W3.write", {"bytes": size})


def _wait(cell: Cell, right: Callable[[], bool], closed: float) -> Arrival:
    """Wait until right() says that S3 has the data, and return when it had. Errors: NotInS3 after in_s3_s."""
    if not cell.subject.remote:
        return Arrival(closed, late=not cell.subject.plain)
    arrival = cell.bench.bucket.wait(right, closed, cell.sizes.in_s3_s)
    if arrival is None:
        raise NotInS3(f"not whole in S3 {cell.sizes.in_s3_s:.0f} s after close")
    return replace(arrival, late=arrival.late or cell.subject.late)


def _right(check: Callable[[], None]) -> None:
    try:
        check()
    except WrongContent as error:
        raise NotInS3(f"wrong content in S3: {error}") from error


# -- W4: random reads and streams


def read_randomly(cell: Cell) -> None:
    """Read at random offsets and in parallel streams, each on a cold mount."""
    sizes = cell.sizes
    for metric, length in RANDOM.items():
        with cell.measuring(metric), cell.opened() as mount:
            arguments = {"size": sizes.big, "length": length, "count": sizes.random_reads, "cap_s": sizes.cap_s}
            cell.rate(metric, cell.work("filework.read_random", path=str(mount.root / BIG), **arguments))
    with cell.measuring("W4.streams"), cell.opened() as mount:
        arguments = {"size": sizes.big, "streams": STREAMS, "cap_s": sizes.cap_s}
        cell.rate("W4.streams", cell.work("filework.read_streams", path=str(mount.root / BIG), **arguments))


def native_read_randomly(cell: Cell) -> None:
    """Read at random offsets, one request after the other."""
    sizes = cell.sizes
    for metric, length in RANDOM.items():
        with cell.measuring(metric), cell.opened():
            arguments = {"size": sizes.big, "length": length, "count": sizes.random_reads, "cap_s": sizes.cap_s}
            cell.rate(metric, cell.native_work("get_random", key=BIG, **arguments))


# -- W5, W6: small files


def _small(sizes: Sizes) -> dict[str, float]:
    return {"count": sizes.small_files, "size": sizes.small_size, "cap_s": sizes.cap_s}


def read_small(cell: Cell) -> None:
    """Read the small files cold and again, with one thread and with 16."""
    for name, threads in THREADS.items():
        with cell.measuring(f"W5.{name}", f"W6.{name}"), cell.opened() as mount:
            folder = str(mount.root / SMALL)
            for metric in (f"W5.{name}", f"W6.{name}"):
                answer = cell.work("filework.read_files", folder=folder, threads=threads, **_small(cell.sizes))
                cell.rate(metric, answer)


def native_read_small(cell: Cell) -> None:
    """Download the small objects, with one thread and with 16."""
    for name, threads in THREADS.items():
        with cell.measuring(f"W5.{name}"), cell.opened():
            answer = cell.native_work("get_objects", prefix=SMALL, threads=threads, **_small(cell.sizes))
            cell.rate(f"W5.{name}", answer)


# -- W7: create small files


def create_small(cell: Cell) -> None:
    """Create small files, with one thread and with 16."""
    for name, threads in THREADS.items():
        with cell.measuring(f"W7.{name}"), cell.opened() as mount:
            folder = str(mount.root / cell.tag / name)
            answer = cell.work("filework.create_files", folder=folder, threads=threads, **_small(cell.sizes))
            _small_arrived(cell, name, answer)


def native_create_small(cell: Cell) -> None:
    """Upload small objects, with one thread and with 16."""
    for name, threads in THREADS.items():
        with cell.measuring(f"W7.{name}"), cell.opened():
            prefix = f"{cell.tag}/{name}"
            answer = cell.native_work("put_objects", prefix=prefix, threads=threads, **_small(cell.sizes))
            _small_arrived(cell, name, answer)


def _small_arrived(cell: Cell, name: str, answer: Answer) -> None:
    size, count, bucket = cell.sizes.small_size, int(answer["count"]), cell.bench.bucket
    prefix = f"{cell.tag}/{name}"

    def right() -> bool:
        return sum(1 for each in bucket.sizes(f"{prefix}/").values() if each == size) == count

    arrival = _wait(cell, right, answer["closed"])
    if cell.subject.remote and not answer["partial"]:
        _right(lambda: bucket.check_small(prefix, count, size))
    seconds = arrival.at - answer["began"]
    cell.record(f"W7.{name}", count / seconds, late=arrival.late, partial=bool(answer["partial"]))
    if not arrival.late:
        cell.processor(f"W7.{name}", answer)


# -- W8: walks


def _walked(sizes: Sizes) -> Mapping[str, int]:
    return {TREE: sizes.tree_folders * (sizes.tree_files + 1), FLAT: sizes.flat_files}


def walk_twice(cell: Cell) -> None:
    """Walk the tree and the flat folder, each cold and again."""
    for top, entries in _walked(cell.sizes).items():
        with cell.measuring(f"W8.{top}_cold", f"W8.{top}_warm"), cell.opened() as mount:
            for metric in (f"W8.{top}_cold", f"W8.{top}_warm"):
                arguments = {"top": str(mount.root / top), "entries": entries, "cap_s": cell.sizes.walk_cap_s}
                answer = cell.work("filework.walk", **arguments)
                cell.record(metric, answer["seconds"], partial=bool(answer["partial"]))
                cell.processor(metric, answer)


def native_list(cell: Cell) -> None:
    """List the tree and the flat folder recursively."""
    sizes = cell.sizes
    for top, keys in {TREE: sizes.tree_folders * sizes.tree_files, FLAT: sizes.flat_files}.items():
        with cell.measuring(f"W8.{top}_cold"), cell.opened():
            cell.record(f"W8.{top}_cold", cell.native_work("list_keys", prefix=top, entries=keys)["seconds"])


# -- W9: metadata


@dataclass(frozen=True, slots=True)
class Change:
    """One kind of call. where: the folder it works in. seen: how many keys below that folder must be in S3 afterwards,
    by the beginning and end of their names. made_by: the call on whose results it works; it is late if that was."""

    where: str
    seen: Callable[[int], Mapping[tuple[str, str], int]] = lambda count: {}
    made_by: str = ""


FILES, RENAMED = "files", "files2"
CHANGES = {
    "mkdir": Change("dirs", lambda count: {("d", "/"): count}),
    # A subject that has written no markers of directories to S3 has none to remove.
    "rmdir": Change("dirs", lambda count: {("d", "/"): 0}, made_by="mkdir"),
    "create": Change(FILES, lambda count: {("f", ""): count}),
    "stat": Change(FILES, made_by="create"),
    "rename": Change(FILES, lambda count: {("g", ""): count, ("f", ""): 0}),
    "symlink": Change("links", lambda count: {("s", ""): count}),
    "readlink": Change("links", made_by="symlink"),
    "unlink": Change("gone", lambda count: {("u", ""): 0}),
}
assert CHANGES.keys() == META_OPERATIONS.keys()


def change_metadata(cell: Cell) -> None:
    """Measure one kind of call after the other, and look into S3 after each."""
    late: dict[str, bool] = {}
    with cell.opened() as mount:
        top = mount.root / cell.tag
        cell.work("filework.make_folders", folders=[str(top / name) for name in ("dirs", FILES, "links", "gone")])
        cell.work("filework.metadata", operation="litter", folder=str(top / "gone"), count=cell.sizes.meta_calls)
        for name, change in CHANGES.items():
            with cell.measuring(f"W9.{name}"):
                late[name] = _change(cell, top, name, change, late.get(change.made_by, False))
        with cell.measuring("W9.rename_dir"):
            _rename_dir(cell, top)


def _change(cell: Cell, top: Path, name: str, change: Change, late: bool) -> bool:
    count = cell.sizes.meta_calls
    answer = cell.work("filework.metadata", operation=name, folder=str(top / change.where), count=count)
    late = late or _is_late(cell, change.where, change.seen(count))
    cell.record(f"W9.{name}", count / max(answer["seconds"], 1e-9), late=late)
    return late


def _is_late(cell: Cell, folder: str, wanted: Mapping[tuple[str, str], int]) -> bool:
    """Whether S3 does not have the wanted numbers of keys below a folder at the first look."""
    if not cell.subject.remote:
        return not cell.subject.plain

    def right() -> bool:
        keys = cell.bench.bucket.sizes(f"{cell.tag}/{folder}/")
        return all(
            sum(1 for key in keys if key.startswith(begins) and key.endswith(ends)) == count
            for (begins, ends), count in wanted.items()
        )

    arrival = cell.bench.bucket.wait(right, math.nan, LATE_S) if wanted else Arrival(math.nan, late=False)
    return arrival is None or arrival.late or cell.subject.late


def _rename_dir(cell: Cell, top: Path) -> None:
    answer = cell.work("filework.rename_folder", old=str(top / FILES), new=str(top / RENAMED))
    late = _is_late(cell, FILES, {("", ""): 0}) or _is_late(cell, RENAMED, {("g", ""): cell.sizes.meta_calls})
    cell.record("W9.rename_dir", answer["seconds"], late=late)


def _of(*workloads: str) -> tuple[str, ...]:
    return tuple(metric.id for metric in METRICS if metric.workload in workloads)


GROUPS = (
    Group(("W1", "W2"), read_twice, _of("W1", "W2"), native_read, never=frozenset({WRITE_BACK})),
    Group(("W3",), write_big, _of("W3"), native_write, needs_data=False, writes=True, never=frozenset({WRITE_BACK})),
    Group(("W4",), read_randomly, _of("W4"), native_read_randomly, never=frozenset({WRITE_BACK})),
    Group(("W5", "W6"), read_small, _of("W5", "W6"), native_read_small, never=frozenset({WRITE_BACK})),
    Group(
        ("W7",),
        create_small,
        _of("W7"),
        native_create_small,
        needs_data=False,
        writes=True,
        never=frozenset({READ_ONLY}),
    ),
    Group(("W8",), walk_twice, _of("W8"), native_list, never=frozenset({WRITE_BACK})),
    Group(("W9",), change_metadata, _of("W9"), needs_data=False, writes=True, never=frozenset({WRITE_BACK})),
)
