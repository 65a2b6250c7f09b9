"""datastore.controller.runtime.election, over an API server that keeps one Lease."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from datastore.api.resources import LEASES, Resource
from datastore.controller.runtime.client import ApiError, Client, Unavailable
from datastore.controller.runtime.election import ECHO_S, LEASE_S, RENEW_S, RETRY_S, Election, LeaseLost
from tests.promises import promise


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Api(Client):
    """Keeps a Lease, refuses what is out of date. away: does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.away = False
        self.candidates: list[Election] = []

    async def get(self, resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        assert (resource, namespace, name) == (LEASES, "system", "l")
        self._answers()
        return self.lease

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self.lease is not None:
            raise ApiError(409, "AlreadyExists", "it is there")
        return self._store(body)

    async def update(self, resource: Resource, body: Mapping[str, Any]) -> dict[str, Any]:
        self._answers()
        if self.lease is None or body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "another version")
        return self._store(body)

    def _answers(self) -> None:
        if self.away:
            raise Unavailable("no answer")

    def _store(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        for candidate in self.candidates:
            candidate.echoed({"type": "MODIFIED", "object": self.lease})
        return self.lease


class World:
    """Two candidates, each with a clock of its own that starts anywhere."""

    def __init__(self) -> None:
        self.api, self.clock = Api(), Clock()
        self.one = Election(self.api, "system", "l", "one", self.clock)
        self.two = Election(self.api, "system", "l", "two", lambda: self.clock.now - 500.0)
        self.api.candidates += [self.one, self.two]

    def steps(self, *who: Election) -> None:
        for each in who:
            try:
                asyncio.run(each._step())
            except (ApiError, Unavailable):
                continue

    def wait(self, seconds: float, *who: Election) -> None:
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now += RETRY_S
            self.steps(*who)


@pytest.fixture
def world() -> World:
    return World()


@promise("S-246")
def test_the_leader_renews_its_lease_and_keeps_leading(world: World) -> None:
    world.steps(world.one, world.two)
    world.wait(100, world.one, world.two)
    assert (world.one.leading(), world.two.leading()) == (True, False)
    with pytest.raises(LeaseLost):
        world.two.check()
    assert world.api.lease is not None
    assert world.api.lease["spec"]["leaseTransitions"] == 1


@promise("S-246")
def test_a_paused_leader_stops_writing_before_another_one_starts(world: World) -> None:
    """`one` is stopped and goes on later, without a chance to look at anything first."""
    world.steps(world.one, world.two)
    paused_at = world.clock.now
    while not world.two.leading():
        world.wait(RETRY_S, world.two)
    assert world.clock.now - paused_at <= LEASE_S + 2 * RETRY_S
    with pytest.raises(LeaseLost):
        world.one.check()
    world.steps(world.one)
    assert not world.one.leading()


@promise("S-246")
def test_the_old_leaders_last_write_and_the_new_ones_first_are_apart(world: World) -> None:
    """Also when the API server answers nobody for a while."""
    world.steps(world.one, world.two)
    world.api.away = True
    world.wait(RENEW_S - RETRY_S, world.one, world.two)
    world.one.check()
    world.wait(RETRY_S, world.one, world.two)
    with pytest.raises(LeaseLost):
        world.one.check()
    assert not world.two.leading()
    world.api.away = False
    world.wait(RETRY_S, world.two)
    assert not world.two.leading(), "it has not seen the Lease unchanged for a whole term"


@promise("S-246")
def test_only_one_of_two_simultaneous_candidates_wins(world: World) -> None:
    world.steps(world.one)
    asyncio.run(world.one.release())
    stale = world.api.lease
    world.steps(world.one)
    fresh, world.api.lease = world.api.lease, stale
    read = world.api.get

    async def late(resource: Resource, namespace: str, name: str) -> dict[str, Any] | None:
        found = await read(resource, namespace, name)
        world.api.lease = fresh
        return found

    world.api.get = late  # type: ignore[method-assign]
    world.steps(world.two)
    assert not world.two.leading()


def test_an_orderly_exit_lets_the_next_leader_start_at_once(world: World) -> None:
    world.steps(world.one, world.two)
    asyncio.run(world.one.release())
    assert not world.one.leading()
    world.wait(RETRY_S, world.two)
    assert world.two.leading()


@promise("S-247")
def test_a_dead_watch_is_noticed_by_leader_and_follower(world: World) -> None:
    world.steps(world.one, world.two)
    started = world.clock.now
    world.api.candidates.clear()
    world.wait(ECHO_S - RETRY_S, world.one, world.two)
    assert world.one.alive(started)
    world.wait(2 * RETRY_S, world.one, world.two)
    assert not world.one.alive(started)
    assert not world.one.leading(), "what it does not see it must not act on"
    assert not world.two.alive(started - 500.0)
    assert not world.two.ready()


@promise("S-247")
def test_an_api_server_that_is_away_is_noticed(world: World) -> None:
    world.steps(world.one)
    started = world.clock.now
    world.api.away = True
    world.wait(ECHO_S + RETRY_S, world.one)
    assert not world.one.alive(started)
