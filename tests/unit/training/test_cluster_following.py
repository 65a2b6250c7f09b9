"""Following a job of a cluster: its API server goes away and comes back, and a save waits."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from datastore import kubeclient
from datastore.cli.app import run
from datastore.cli.job import following
from datastore.errors import DatastoreError, Unreachable
from datastore.mounting.signals import watching
from datastore.training.cluster import driver, names
from datastore.training.driver import LogLine, Observed
from tests.playedapi import PlayedApi, played_api
from tests.promises import promise
from tests.unit.training.jobs import job

JOB = "/apis/datastore.dev/v1alpha1/namespaces/team/trainingjobs/digits"
PODS = "/api/v1/namespaces/team/pods"
LOG = f"{PODS}/digits-master-0/log"
AWAY = (503, "apiserver is shutting down")


@pytest.fixture
def api() -> Iterator[PlayedApi]:
    with played_api() as played:
        body = job(framework="none").model_dump(by_alias=True, mode="json", exclude_none=True)
        body["metadata"]["namespace"] = "team"
        played.objects[JOB] = body | {"status": {"phase": "Running"}}
        played.objects[f"{PODS}/digits-master-0"] = {
            "metadata": {
                "name": "digits-master-0",
                "uid": "u",
                "labels": {names.JOB: "digits", names.ROLE: "master", names.INDEX: "0"},
            },
            "spec": {"nodeName": "n"},
            "status": {"phase": "Running"},
        }
        played.objects[LOG] = {"text": "2026-01-01T00:00:01.0Z one\n"}
        yield played


@pytest.fixture
def cluster(api: PlayedApi, tmp_path: Path) -> driver.KubernetesDriver:
    return driver.KubernetesDriver(kubeclient.of_context({"KUBECONFIG": str(api.kubeconfig(tmp_path))}))


def ends(api: PlayedApi) -> None:
    """The API server is there, and the job has succeeded."""
    api.refused.clear()
    api.objects[LOG]["text"] += "2026-01-01T00:00:02.0Z two\n"
    api.objects[JOB]["status"]["phase"] = "Succeeded"


@promise("S-365")
def test_a_log_is_followed_over_an_outage(api: PlayedApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line is shown once, and the outage is reported once. Between two requests the API server goes away and
    comes back."""
    told: list[str] = []
    cluster = driver.KubernetesDriver(kubeclient.of_context({"KUBECONFIG": str(api.kubeconfig(tmp_path))}), told.append)
    steps = iter(
        (
            lambda: api.refused.update({"/api/v1": AWAY}),
            lambda: api.refused.update({"/": AWAY}),
            lambda: None,
            lambda: ends(api),
        )
    )
    monkeypatch.setattr(driver.time, "sleep", lambda _: next(steps)())  # type: ignore[attr-defined]
    assert [each.text for each in cluster.logs("digits", "team", follow=True)] == ["one", "two"]
    assert next(steps, None) is None
    assert len(told) == 1
    assert told[0].endswith("; the job continues, and its log is shown again when it answers")


def test_a_log_begins_with_its_last_lines_and_is_followed(
    api: PlayedApi, cluster: driver.KubernetesDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server is asked for the end of the log only, and then for what is new."""
    api.objects[LOG]["text"] = "2026-01-01T00:00:00.0Z none\n2026-01-01T00:00:01.0Z one\n"
    monkeypatch.setattr(driver.time, "sleep", lambda _: ends(api))  # type: ignore[attr-defined]
    assert [each.text for each in cluster.logs("digits", "team", follow=True, tail=1)] == ["one", "two"]
    asked = [parse_qs(urlsplit(target).query) for _, target, _ in api.asked if "/log?" in target]
    assert [(each.get("tailLines"), each.get("sinceTime")) for each in asked] == [
        (["1001"], None),
        (None, ["2026-01-01T00:00:01Z"]),
    ]


@promise("S-348")
def test_a_progress_bar_is_followed_and_no_line_is_lost(
    api: PlayedApi, cluster: driver.KubernetesDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet writes a time before what ends with a newline only. It gives the beginning of a longer line, which
    then grows, and several lines may have one time."""
    at = "2026-01-01T00:00:0%d.0Z "
    wrote = [
        f"{at % 1}one\n{at % 1}two\n{at % 2}\r epoch: 10%\repoch: 20%",
        f"\repoch: 30%\n{at % 3}a\x0cb\u2028c\n",
        f"{at % 3}same time\n{at % 4}the last word",
    ]
    api.objects[LOG]["text"] = wrote.pop(0)

    def goes_on(_: float) -> None:
        api.objects[LOG]["text"] += wrote.pop(0)
        if not wrote:
            api.objects[JOB]["status"]["phase"] = "Succeeded"

    monkeypatch.setattr(driver.time, "sleep", goes_on)  # type: ignore[attr-defined]
    lines = [each.text for each in cluster.logs("digits", "team", follow=True)]
    bar = [" epoch: 10%", "epoch: 20%", "epoch: 30%"]
    assert lines == ["one", "two", *bar, "a\x0cb\u2028c", "same time", "the last word"]
    asked = [parse_qs(urlsplit(target).query) for _, target, _ in api.asked if "/log?" in target]
    since = [each.get("sinceTime") for each in asked]
    assert since == [None, ["2026-01-01T00:00:02Z"], ["2026-01-01T00:00:03Z"]]


@promise("S-365")
def test_a_lasting_outage_is_reported(
    api: PlayedApi, cluster: driver.KubernetesDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def sleep(_: float) -> None:
        clock[0] += 60.0
        api.refused["/"] = AWAY

    monkeypatch.setattr(kubeclient.time, "monotonic", lambda: clock[0])  # type: ignore[attr-defined]
    monkeypatch.setattr(driver.time, "sleep", sleep)  # type: ignore[attr-defined]
    with pytest.raises(Unreachable, match="shutting down"):
        list(cluster.logs("digits", "team", follow=True))
    assert clock[0] == 60.0 + kubeclient.OUTAGE_S + 60.0, "it went away after the first minute"


@promise("S-365")
def test_without_follow_an_outage_is_an_error_at_once(api: PlayedApi, cluster: driver.KubernetesDriver) -> None:
    api.refused["/api/v1"] = AWAY
    with pytest.raises(Unreachable, match="shutting down"):
        list(cluster.logs("digits", "team"))


@promise("S-365")
def test_a_job_is_shown_over_an_outage_and_that_is_said(
    cluster: driver.KubernetesDriver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    api: PlayedApi,
) -> None:
    seen: list[Observed | None] = []
    observe = cluster.observe

    def looks(name: str, namespace: str) -> Observed:
        api.refused.clear()
        if len(seen) in (1, 2):
            api.refused["/"] = AWAY
        elif len(seen) == 3:
            ends(api)
        seen.append(None)
        return observe(name, namespace)

    def no_lines(*_: object, **__: object) -> Iterator[LogLine]:
        return iter(())

    monkeypatch.setattr(cluster, "observe", looks)
    monkeypatch.setattr(cluster, "logs", no_lines)
    monkeypatch.setattr(following, "_AWAY_POLL_S", 0.01)
    with watching() as watch:
        observed = following.follow(cluster, "digits", "team", watch)
    assert observed.status.phase == "Succeeded"
    assert capsys.readouterr().err.count("the job continues") == 1


@promise("S-332")
def test_ctrl_c_ends_the_looking_at_a_program_that_never_stops_writing(
    cluster: driver.KubernetesDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(*_: object, **__: object) -> Iterator[LogLine]:
        for number in itertools.count():
            if number == 1000:
                os.kill(os.getpid(), signal.SIGINT)
            yield LogLine(role="master", index=0, text="again")
            if ended.is_set():
                return

    ended = threading.Event()
    monkeypatch.setattr(cluster, "logs", lines)
    monkeypatch.setattr(following, "print_line", lambda line: time.sleep(0.001))  # a slow terminal
    timer = threading.Timer(20.0, ended.set)
    timer.start()
    try:
        with watching() as watch, pytest.raises(following.Detached):
            following.follow(cluster, "digits", "team", watch)
        assert not ended.is_set(), "it was not seen while lines came"
    finally:
        ended.set()
        timer.cancel()


def test_what_a_job_waits_for_is_told_without_a_terminal_too(
    cluster: driver.KubernetesDriver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    api: PlayedApi,
) -> None:
    """On a terminal it is in the last line. It is reported once, until it changes."""
    waits = ["waits for Datastore data: Pending", "waits for Datastore data: Pending", "master-0 waits: no node"]
    observe = cluster.observe

    def looks(name: str, namespace: str) -> Observed:
        if waits:
            api.objects[JOB]["status"] = {"phase": "Pending", "message": waits.pop(0)}
        else:
            ends(api)
        return observe(name, namespace)

    monkeypatch.setattr(cluster, "observe", looks)
    monkeypatch.setattr(cluster, "logs", lambda *_, **__: iter(()))
    with watching() as watch:
        assert following.follow(cluster, "digits", "team", watch).finished
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("digits: ")]
    assert told == ["digits: Pending: waits for Datastore data: Pending", "digits: Pending: master-0 waits: no node"]


def test_a_job_whose_log_can_not_be_read_is_shown_to_its_end(
    cluster: driver.KubernetesDriver, capsys: pytest.CaptureFixture[str], api: PlayedApi
) -> None:
    """The reason is one line."""
    api.refused[LOG] = (403, "pods/log is forbidden")
    api.objects[JOB]["status"]["phase"] = "Succeeded"
    with watching() as watch:
        observed = following.follow(cluster, "digits", "team", watch)
    assert observed.status.phase == "Succeeded"
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "the log is not shown" in line]
    assert "pods/log is forbidden" in said


@promise("S-355")
def test_a_save_that_waits_is_told_and_hinders_nothing(
    cluster: driver.KubernetesDriver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    api: PlayedApi,
) -> None:
    """No process of the job runs, so there is nothing to free or to suspend."""
    saved = {"type": "Saved", "status": "False", "reason": "Saving", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    api.objects[JOB]["spec"]["save"] = {"model": "digits", "from": "/out"}
    api.objects[JOB]["status"] = {"phase": "Succeeded", "conditions": [{**saved, "message": "exceeded quota"}]}
    monkeypatch.setattr(driver, "FREE_TIMEOUT_S", 0.0)
    cluster.free("digits", "team")
    with pytest.raises(DatastoreError, match="has finished"):
        cluster.suspend("digits", "team", suspended=True)
    assert not [each for each in api.asked if each[0] == "PATCH"]
    looks = 0
    observe = cluster.observe

    def look(name: str, namespace: str) -> Observed:
        nonlocal looks
        looks += 1
        if looks == 3:
            api.objects[JOB]["status"]["conditions"] = [{**saved, "status": "True", "reason": "Saved"}]
        return observe(name, namespace)

    monkeypatch.setattr(cluster, "observe", look)
    monkeypatch.setattr(cluster, "logs", lambda *_, **__: iter(()))
    with watching() as watch:
        assert following.follow(cluster, "digits", "team", watch).finished
    assert capsys.readouterr().err.count("its result is not saved yet: exceeded quota") == 1


def test_the_logs_of_a_job_that_does_not_run_yet_say_what_it_waits_for(
    api: PlayedApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """kubectl does the same for a pod. Without this, the program would seem to write nothing."""
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    del api.objects[f"{PODS}/digits-master-0"]
    api.objects[JOB]["status"] = {"phase": "Pending", "message": "master-0 waits: ImagePullBackOff"}
    run(["job", "logs", "digits"])
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "digits does not run yet: master-0 waits: ImagePullBackOff\n")

    api.objects[JOB]["status"] = {"phase": "Running"}
    run(["job", "logs", "digits"])
    assert capsys.readouterr().err == ""
