"""The work of filework.py done by a plain S3 client: obstore with 16 connections."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from datetime import timedelta
from itertools import count as numbers
from typing import Any

import obstore
from obstore.store import S3Store

from bench.filework import Answer, parallel
from bench.payload import WrongContent, block, blocks, check_file, check_part

CONNECTIONS = 16
RANGE = 8 << 20
PART = 16 << 20
PAGE = 1000


def open_store(endpoint: str, region: str, bucket: str, access_key: str, secret_key: str, ca_bundle: str = "") -> Any:
    """Open a bucket of a local server with path-style requests. ca_bundle: for a server that speaks TLS."""
    options: Any = {"allow_http": True, "timeout": timedelta(seconds=120)}
    if ca_bundle:
        options["root_certificate"] = ca_bundle
    return S3Store(
        bucket,
        endpoint=endpoint,
        region=region,
        access_key_id=access_key,
        secret_access_key=secret_key,
        virtual_hosted_style_request=False,
        client_options=options,
    )


def get_to_file(store: Mapping[str, str], key: str, size: int, path: str) -> Answer:
    """Download an object in parallel ranges into a local file, and remove the file."""
    client = open_store(**store)
    offsets = iter(range(0, size, RANGE))
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)

    def getter(_number: int) -> None:
        for offset in offsets:  # shared by the threads: next() of a range's iterator is atomic
            body = memoryview(obstore.get_range(client, key, start=offset, end=min(offset + RANGE, size)))
            check_part(offset, body, key)
            os.pwrite(descriptor, body, offset)

    try:
        seconds = parallel(CONNECTIONS, getter)
    finally:
        os.close(descriptor)
        os.unlink(path)
    return {"seconds": seconds, "bytes": size}


def put_multipart(store: Mapping[str, str], key: str, size: int) -> Answer:
    """Upload an object in parallel parts."""
    client = open_store(**store)
    began = time.monotonic()
    obstore.put(client, key, blocks(size), use_multipart=True, chunk_size=PART, max_concurrency=CONNECTIONS)
    return {"began": began, "closed": time.monotonic()}


def get_random(store: Mapping[str, str], key: str, size: int, length: int, count: int, cap_s: float) -> Answer:
    """Read ranges at the offsets of filework.read_random, one after the other."""
    client = open_store(**store)
    places = random.Random(length)
    began = time.monotonic()
    done = 0
    while done < count and time.monotonic() - began < cap_s:
        offset = places.randrange(size // length) * length
        check_part(offset, memoryview(obstore.get_range(client, key, start=offset, length=length)), key)
        done += 1
    return {"seconds": time.monotonic() - began, "count": done, "partial": done < count}


def get_objects(store: Mapping[str, str], prefix: str, count: int, size: int, threads: int, cap_s: float) -> Answer:
    """Download the objects that filework.read_files reads."""
    client = open_store(**store)
    deadline = time.monotonic() + cap_s
    done = [0] * threads

    def getter(first: int) -> None:
        for number in range(first, count, threads):
            if time.monotonic() > deadline:
                return
            key = f"{prefix}/f{number:05}"
            check_file(number, memoryview(obstore.get(client, key).bytes()), size, key)
            done[first] += 1

    seconds = parallel(threads, getter)
    return {"seconds": seconds, "count": sum(done), "partial": sum(done) < count}


def put_objects(store: Mapping[str, str], prefix: str, count: int, size: int, threads: int, cap_s: float) -> Answer:
    """Upload the objects that filework.create_files creates."""
    client = open_store(**store)
    began = time.monotonic()
    deadline = began + cap_s
    done = [0] * threads

    def putter(first: int) -> None:
        for number in range(first, count, threads):
            if time.monotonic() > deadline:
                return
            obstore.put(client, f"{prefix}/f{number:05}", block(number, size), use_multipart=False)
            done[first] += 1

    parallel(threads, putter)
    return {"began": began, "closed": time.monotonic(), "count": sum(done), "partial": sum(done) < count}


def list_keys(store: Mapping[str, str], prefix: str, entries: int) -> Answer:
    """List the keys below a prefix recursively. Errors: WrongContent when there are not `entries` of them."""
    client = open_store(**store)
    began = time.monotonic()
    found = sum(len(page) for page in obstore.list(client, f"{prefix}/", chunk_size=PAGE))
    if found != entries:
        raise WrongContent(f"{prefix}/: {found} keys, not {entries}")
    return {"seconds": time.monotonic() - began}


def put_tiny(store: Mapping[str, str], prefixes: Mapping[str, int], size: int) -> Answer:
    """Fill the bucket: upload the given number of objects below each prefix, 16 at a time."""
    client = open_store(**store)
    keys = [f"{prefix}/f{number:05}" for prefix, files in prefixes.items() for number in range(files)]
    turn = numbers()

    def putter(_number: int) -> None:
        while (at := next(turn)) < len(keys):
            obstore.put(client, keys[at], block(at, size), use_multipart=False)

    return {"seconds": parallel(CONNECTIONS, putter), "count": len(keys)}
