"""TrainingJobs on this machine, as a person runs them: real mounts of a real store, real processes, no frameworks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import re
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datastore import controlclient
from datastore.api.manifest import load, parse
from datastore.cli.exitcodes import ExitCode
from datastore.mounting.records import all_records
from datastore.mounting.signals import watching
from datastore.training.local import launcher as launcher_module
from datastore.training.local.driver import LocalDriver
from datastore.training.local.launcher import GRACE_S, Launcher
from datastore.training.local.records import JobDirectory, LocalState, Submitter, directory_of
from tests.patience import eventually
from tests.promises import promise
from tests.servers import boto_client, free_port, make_bucket
from tests.training.laptop import PATIENCE_S, Laptop, cgroups_of, gone, kill_launcher, kill_replica, pids_of
from tests.unit.training.jobs import job

pytestmark = [pytest.mark.fuse, pytest.mark.timeout(600)]

MOUNTS = "  datastores: [{name: data, path: /data, readOnly: true}, {name: out, path: /results/here}]\n"


def shell(text: str) -> str:
    """The command of a job: a line of shell, in which $$ is a $, as in a container's."""
    return f"  command: [sh, -c, {json.dumps(text)}]\n"


def program(laptop: Laptop, text: str, name: str = "program.py") -> str:
    """The command of a job: Python code, in the directory where the job is submitted."""
    (laptop.directory / name).write_text(text)
    return f"  command: [python, {name}]\n"


@promise("S-327")
@pytest.mark.plain_user
def test_datastores_stand_at_their_paths_and_nowhere_else(laptop: Laptop) -> None:
    line = (
        "set -e; ls /data; test ! -e /results/here/x; echo hello > /results/here/x; echo deep > /deep/y; pwd; "
        "if echo no > /data/z 2>/dev/null; then exit 9; fi; if mkdir /results/other 2>/dev/null; then exit 8; fi"
    )
    mounts = MOUNTS.replace("}]", "}, {name: out, path: /deep, subPath: a/b}]")
    file = laptop.manifest("places", "  framework: none\n  workingDir: /workspace\n" + shell(line) + mounts)
    said = laptop.submit(file, "--follow")
    assert "[master-0] digits.npz" in said
    assert "[master-0] /workspace" in said
    assert f"{laptop.directory} is shown at /workspace" in said
    assert laptop.stored() >= {"x", "a/b/y"}
    assert not any(Path(path).exists() for path in ("/data", "/results", "/deep", "/workspace"))


@promise("S-327", "S-328")
@pytest.mark.plain_user
def test_the_same_file_gives_every_task_its_place(laptop: Laptop) -> None:
    """TF_CONFIG has loopback ports that differ, and role and index are in it."""
    text = "import json, os, pathlib\nname = os.environ['DATASTORE_ROLE'] + os.environ['DATASTORE_INDEX']\n"
    text += "pathlib.Path('/results/here', name).write_text(os.environ['TF_CONFIG'])\n"
    spec = "  framework: tensorflow\n  success: allWorkers\n  roles: {worker: {replicas: 2}, evaluator: {}}\n"
    laptop.submit(laptop.manifest("tf", spec + program(laptop, text) + MOUNTS), "--follow")
    client = boto_client(laptop.server)
    found = {}
    for key in ("master0", "worker0", "worker1", "evaluator0"):
        found[key] = json.loads(client.get_object(Bucket=laptop.out, Key=key)["Body"].read())
    assert [each["task"] for each in found.values()] == [
        {"type": "chief", "index": 0},
        {"type": "worker", "index": 0},
        {"type": "worker", "index": 1},
        {"type": "evaluator", "index": 0},
    ]
    clusters = [each["cluster"] for each in found.values()]
    assert all(each == clusters[0] for each in clusters)
    addresses = [*clusters[0]["chief"], *clusters[0]["worker"]]
    assert len(set(addresses)) == 3
    assert all(each.startswith("127.0.0.1:") for each in addresses)


@promise("S-320", "S-332")
@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("  framework: tensorflw\n  command: [a]\n", "spec.framework must be 'tensorflow'"),
        (
            "  framework: none\n  command: [sh]\n  datastores: [{name: dta, path: /data}]\n",
            "spec.datastores: ",
        ),
        (
            "  framework: none\n  command: [sh]\n  datastores: [{name: data, path: /a}, {name: out, path: /a}]\n",
            "mounts two Datastores at /a: data and out",
        ),
        ("  framework: none\n  command: [no-such-program]\n", "no-such-program: no such command on PATH"),
        ("  framework: none\n  image: digits:1\n", "the command of master-0: spec.command is missing; --local runs"),
        ("  framework: none\n  command: [./missing.sh]\n", "./missing.sh: no such command"),
        ("  framework: none\n  command: [./plain.txt]\n", "./plain.txt: can't be executed"),
        (
            "  framework: none\n  command: [sh]\n  roles: {worker: {replicas: 2, gpus: 99}}\n",
            "it needs 198 GPUs (worker-0 alone 99), and this machine has ",
        ),
        ("  framework: jax\n  command: [sh]\n  roles: {ps: {}}\n", "jax has no ps"),
        (
            "  framework: none\n  command: [sh]\n  save: {model: m, from: /out}\n" + MOUNTS,
            "spec.save.from: /out is in none of the job's Datastores (",
        ),
        (
            "  framework: none\n  command: [sh]\n  save: {model: m, from: /data/runs}\n" + MOUNTS,
            "spec.save.from: /data/runs is in the Datastore data, which the job mounts read-only",
        ),
        (
            "  framework: none\n  command: [sh]\n  save: {model: m, from: /results/here}\n" + MOUNTS,
            "spec.save: ",
        ),
        ("  framework: none\n  command: [sh]\n  schedule: '0 99 * * *'\n", "is wrong: Bad hour"),
        (
            "  framework: none\n  command: [sh]\n  env: [{name: A, valueFrom: {secretKeyRef: {name: keys}}}]\n",
            "spec.env[0].valueFrom.secretKeyRef.key is missing",
        ),
        (
            "  framework: none\n  command: [sh]\n  env: [{name: A, valueFrom: {secretKeyRef: {name: keys, key: x}}}]\n",
            "variable A: no Secret keys with the key x is in the file",
        ),
        (
            '  framework: none\n  command: [sh]\n  env: [{name: A, value: "a\\0b"}]\n',
            "variable A holds a NUL character",
        ),
        ('  framework: none\n  command: [sh, "a\\0b"]\n', "its command holds a NUL character"),
        ('  framework: none\n  command: [""]\n', "its command begins with an empty word, not a program"),
        (
            "  framework: none\n  command: [sh]\n  workingDir: /results/here/new\n" + MOUNTS,
            "spec.workingDir: /results/here/new is no directory of a Datastore; make it there first",
        ),
        (
            "  framework: none\n  command: [sh]\n  workingDir: /data/digits.npz\n" + MOUNTS,
            "spec.workingDir: /data/digits.npz is no directory of a Datastore",
        ),
        (
            "  framework: none\n  command: [sh]\n  workingDir: /etc/passwd\n",
            "spec.workingDir: /etc/passwd is no directory of this machine",
        ),
    ],
)
def test_a_job_that_cannot_run_is_refused_and_leaves_nothing(laptop: Laptop, spec: str, line: str) -> None:
    (laptop.directory / "plain.txt").write_text("no program")
    said = laptop.refused(laptop.manifest("wrong", spec))
    assert line in said
    if "dta" in spec:
        assert "did you mean data?" in said


@promise("S-342")
@pytest.mark.plain_user
def test_a_result_is_saved_as_a_version_of_a_model(laptop: Laptop) -> None:
    """When it has succeeded; and a save that fails is told."""
    store = (
        "---\napiVersion: datastore.dev/v1alpha1\nkind: Datastore\nmetadata: {name: models}\nspec: {s3: {bucket: "
        f"{laptop.out}, prefix: kept/, endpoint: '{laptop.server.endpoint}', credentialsSecret: keys}}}}\n"
    )
    spec = "  framework: none\n  save: {model: digits, from: /results/here/run/best}\n" + MOUNTS
    for name, made, code in (("kept", "best", 0), ("lost", "other", 1)):
        line = shell(f"mkdir -p /results/here/run/{made} && echo weights >/results/here/run/{made}/w")
        file = laptop.manifest(name, spec + line, laptop.datastores() + store)
        done = laptop.run("job", "submit", "-f", file, "--local", "--follow", "-o", "json")
        assert done.returncode == code, done.stderr
        boto_client(laptop.server).delete_object(Bucket=laptop.out, Key="run/best/w")
    version = json.loads(
        boto_client(laptop.server).get_object(Bucket=laptop.out, Key="kept/digits/1.json")["Body"].read()
    )
    assert (version["lineage"]["trainingJob"], version["lineage"]["command"][0]) == ("kept", "sh")
    kept, lost = laptop.get("kept")["status"], laptop.get("lost")["status"]
    assert kept["message"] == "the training has succeeded; saved as digits:1"
    assert lost["phase"] == "Succeeded"
    assert lost["message"].startswith("the training has succeeded; but its result was not saved as a version of ")
    conditions = {each["type"]: (each["status"], each["reason"]) for each in lost["conditions"]}
    assert (conditions["Saved"], conditions["ResourcesFreed"][0]) == (("False", "NotSaved"), "True")
    assert "digits/2.json" not in "".join(laptop.stored())


@promise("S-332")
def test_wrong_keys_are_reported_and_leave_nothing(laptop: Laptop) -> None:
    file = laptop.manifest("keys", "  framework: none\n  command: [sh]\n" + MOUNTS)
    file.write_text(file.read_text().replace(laptop.server.secret_key, "mistaken"))
    said = laptop.refused(file)
    assert "the secret access key is wrong for access key id testaccess" in said
    assert "mistaken" not in said


@promise("S-332")
def test_a_taken_name_is_reported_and_the_running_job_continues(laptop: Laptop) -> None:
    file = laptop.manifest("twice", "  framework: none\n" + shell("sleep 3600"))
    laptop.submit(file)
    laptop.until("twice", "Running")
    assert "TrainingJob twice exists already; `datastore job delete twice` removes it" in laptop.refused(file)
    assert laptop.phase("twice") == "Running"


@promise("S-324", "S-331")
@pytest.mark.plain_user
def test_a_chief_that_fails_frees_everything_and_leaves_the_evidence(laptop: Laptop) -> None:
    line = 'echo "$DATASTORE_ROLE says: out of luck"; [ $DATASTORE_ROLE = worker ] && exec sleep 3600; '
    line += "until [ -e go ]; do sleep 0.1; done; exit 1"
    spec = "  framework: tensorflow\n  roles: {worker: {replicas: 2}}\n"
    laptop.submit(laptop.manifest("luckless", spec + shell(line) + MOUNTS))
    eventually(lambda: laptop.logs("luckless").count("out of luck") == 3, patience_s=PATIENCE_S)
    before = laptop.logs("luckless")
    (laptop.directory / "go").touch()
    found = laptop.until("luckless", "Failed")
    assert found["status"]["message"] == ("master-0 ended with exit code 1; its log says: master says: out of luck")
    assert gone(laptop, "luckless")
    assert laptop.logs("luckless") == before
    assert laptop.logs("luckless", "worker", 1) == "worker says: out of luck\n"
    replicas = {each["role"] + str(each["index"]): each for each in found["evidence"]["replicas"]}
    assert (replicas["master0"]["state"], replicas["master0"]["exitCode"]) == ("Failed", 1)
    assert (replicas["worker1"]["state"], replicas["worker1"]["exitCode"]) == ("Freed", 143)
    assert replicas["master0"]["startedAt"] < replicas["master0"]["endedAt"]
    assert replicas["worker0"]["usage"]["memory"]["peak"] > 0
    conditions = {each["type"]: each["status"] for each in found["status"]["conditions"]}
    assert conditions["Failed"] == conditions["ResourcesFreed"] == "True"
    assert conditions["Running"] == "False"
    assert found["status"]["freedSeconds"] > 0


@promise("S-331")
def test_a_program_that_opens_its_output_anew_loses_no_line(laptop: Laptop) -> None:
    """Shell scripts write their errors so. What a process in the background still writes belongs to the log, too."""
    line = "echo one; echo two > /dev/stderr; echo three > /dev/stdout; (printf four; sleep 0.2; echo 4) & wait"
    laptop.submit(laptop.manifest("reopens", shell(line)))
    laptop.until("reopens", "Succeeded")
    assert laptop.logs("reopens") == "one\ntwo\nthree\nfour4\n"


COUNTING = """
import os, pathlib, time
place = pathlib.Path("/results/here", os.environ["DATASTORE_ROLE"] + os.environ["DATASTORE_INDEX"])
at = int(place.read_text()) if place.exists() else 0
print("begins at", at, flush=True)
while at < 12:
    while at == 3 and not pathlib.Path("go").exists():
        time.sleep(0.1)
    at += 1
    time.sleep(0.25)
    place.with_suffix(".new").write_text(str(at))
    place.with_suffix(".new").rename(place)
print("done", flush=True)
"""
"""Goes on from its checkpoint, and stops half-way until there is a file `go`."""


@promise("S-324")
@pytest.mark.plain_user
def test_a_replica_that_is_killed_goes_on_from_its_checkpoint(laptop: Laptop) -> None:
    """It alone, where nobody waits for the others."""
    spec = "  framework: none\n  roles: {worker: {replicas: 1}}\n"
    laptop.submit(laptop.manifest("counting", spec + program(laptop, COUNTING) + MOUNTS))
    eventually(lambda: "worker0" in laptop.stored(), patience_s=PATIENCE_S)
    kill_replica("counting", "worker-0")
    eventually(lambda: laptop.logs("counting", "worker").count("begins at") == 2, patience_s=PATIENCE_S)
    (laptop.directory / "go").touch()
    found = laptop.until("counting", "Succeeded", "Failed")
    log = laptop.logs("counting", "worker")
    assert found["status"]["phase"] == "Succeeded", log
    assert "[datastore] worker-0 ended with exit code 137 (SIGKILL); worker-0 is started again in 1 s" in log
    assert log.count("begins at") == 2
    assert "begins at 0" not in log.partition("started again")[2]
    assert laptop.logs("counting", "master").count("begins at") == 1
    assert [each["restarts"] for each in found["evidence"]["replicas"]] == [0, 1]


@promise("S-324")
def test_restarts_end_at_the_limit(laptop: Laptop) -> None:
    laptop.submit(laptop.manifest("hopeless", "  framework: none\n  backoffLimit: 1\n" + shell("kill -9 $$$$")))
    found = laptop.until("hopeless", "Failed", "Succeeded")
    assert found["status"]["message"] == "master-0 ended with exit code 137 (SIGKILL), after 1 restart"


@promise("S-325")
def test_a_deadline_fails_the_job(laptop: Laptop) -> None:
    laptop.submit(laptop.manifest("late", "  framework: none\n  activeDeadlineSeconds: 2\n" + shell("sleep 600")))
    found = laptop.until("late", "Failed")
    assert "activeDeadlineSeconds" in found["status"]["message"]
    assert gone(laptop, "late")


@promise("S-325")
@pytest.mark.plain_user
def test_suspend_gives_everything_back_and_resume_goes_on(laptop: Laptop) -> None:
    laptop.submit(laptop.manifest("paused", "  framework: none\n" + program(laptop, COUNTING) + MOUNTS))
    eventually(lambda: "master0" in laptop.stored(), patience_s=PATIENCE_S)
    assert laptop.run("job", "suspend", "paused").returncode == 0
    assert laptop.phase("paused") == "Suspended"
    assert gone(laptop, "paused")
    assert laptop.run("job", "resume", "paused").returncode == 0
    (laptop.directory / "go").touch()
    found = laptop.until("paused", "Succeeded", "Failed")
    assert found["status"]["phase"] == "Succeeded"
    log = laptop.logs("paused")
    assert log.count("begins at") == 2
    assert "begins at 0" not in log.partition("\n")[2]
    assert "has finished" in laptop.run("job", "suspend", "paused").stderr


@promise("S-325")
@pytest.mark.plain_user
@pytest.mark.parametrize("spec", ["", "  suspend: true\n"])
def test_a_job_is_resumed_as_it_was_submitted(laptop: Laptop, spec: str, tmp_path: Path) -> None:
    """From another directory, in a shell that lacks a variable."""
    line = shell("pwd; echo of $SHELL_OF; while [ ! -e go ]; do sleep 0.1; done")
    file = laptop.manifest("moved", f"  framework: none\n{spec}{line}")
    assert laptop.run("job", "submit", "-f", file, "--local", SHELL_OF="submit").returncode == 0
    said = f"{laptop.directory}\nof submit\n"
    if not spec:
        eventually(lambda: laptop.logs("moved") == said, patience_s=PATIENCE_S)
        assert laptop.run("job", "suspend", "moved").returncode == 0
        said += said
    (laptop.directory / "go").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert replace(laptop, directory=elsewhere).run("job", "resume", "moved").returncode == 0
    laptop.until("moved", "Succeeded")
    assert laptop.logs("moved") == said


def submitted_whose_bucket_vanishes(laptop: Laptop, name: str, end: str) -> None:
    """A job that has written a file `late` which the storage does not take; then it does what end says. The file is
    open before the bucket vanishes: who opens it later may be told so at once, and then nothing is written."""
    line = (
        "exec 3> /results/here/late; echo x > /results/here/early; echo stored; while [ ! -e go ]; do sleep 0.1; done; "
        f"echo precious >&3; exec 3>&-; echo tried; {end}"
    )
    laptop.submit(laptop.manifest(name, "  framework: none\n" + shell(line) + MOUNTS))
    eventually(lambda: "stored" in laptop.logs(name), patience_s=PATIENCE_S)
    Path(laptop.server.data_dir, laptop.out).rename(laptop.directory / f"{name}-bucket")  # the server may write to it
    (laptop.directory / "go").touch()
    eventually(lambda: "tried" in laptop.logs(name), patience_s=PATIENCE_S)


@promise("S-325")
def test_a_job_that_is_suspended_while_its_storage_fails_goes_on_and_uploads_the_rest(laptop: Laptop) -> None:
    end = "while [ ! -e again ]; do sleep 0.1; done"
    submitted_whose_bucket_vanishes(laptop, "halted", end)
    done = laptop.run("job", "suspend", "halted")
    assert done.returncode == ExitCode.UNSYNCED
    assert "it is kept on disk: late: " in done.stderr
    found = laptop.get("halted")["status"]
    assert found["phase"] == "Suspended"
    assert found["message"] in done.stderr
    assert gone(laptop, "halted")
    make_bucket(laptop.server, laptop.out)
    (laptop.directory / "again").touch()
    assert laptop.run("job", "resume", "halted").returncode == 0
    laptop.until("halted", "Succeeded")
    assert "late" in laptop.stored()


def test_what_a_finished_job_could_not_upload_is_told_with_the_way_to_it(laptop: Laptop) -> None:
    submitted_whose_bucket_vanishes(laptop, "unlucky", "exit 0")
    message = laptop.until("unlucky", "Succeeded", "Failed")["status"]["message"]
    assert laptop.phase("unlucky") == "Failed"
    assert "still mounted" not in message
    assert gone(laptop, "unlucky")
    way = re.search(r"`datastore unsent --save DIR (\S+)`", message)
    assert way, message
    assert laptop.run("unsent", "--save", laptop.directory / "saved", way[1]).returncode == 0
    assert (laptop.directory / "saved/late").read_text() == "precious\n"
    assert laptop.run("unsent", "--discard", "late", way[1]).returncode == 0


@promise("S-333")
def test_a_job_whose_launcher_was_killed_while_its_storage_fails_says_what_is_not_uploaded(laptop: Laptop) -> None:
    submitted_whose_bucket_vanishes(laptop, "orphan", "sleep 600")
    kill_launcher("orphan")
    eventually(lambda: gone(laptop, "orphan"), patience_s=PATIENCE_S)
    listed = laptop.run("job", "list", "-o", "json")
    assert listed.returncode == 0, listed.stderr
    (found,) = json.loads(listed.stdout)
    assert found["status"]["phase"] == "Failed"
    message = found["status"]["message"]
    assert "its launcher was killed, or this machine went down; not all is uploaded: " in message
    assert "/orphan/mounts/out: not mounted any more, but not uploaded: 1 changed file; kept on disk; " in message
    way = re.search(r"`datastore unsent --save DIR (\S+)`", message)
    assert way, message
    assert laptop.run("unsent", "--save", laptop.directory / "saved", way[1]).returncode == 0
    assert (laptop.directory / "saved/late").read_text() == "precious\n"
    assert laptop.run("unsent", "--discard", "late", way[1]).returncode == 0


@pytest.mark.parametrize(("verb", "code"), [(("delete", "lost"), ExitCode.UNSYNCED), (("prune", "--since", "0s"), 0)])
def test_a_deleted_job_whose_changes_are_not_uploaded_says_where_they_are(
    laptop: Laptop, verb: tuple[str, ...], code: int
) -> None:
    submitted_whose_bucket_vanishes(laptop, "lost", "exit 0")
    laptop.until("lost", "Failed")
    done = laptop.run("job", *verb)
    assert done.returncode == code
    assert "1 changed file of Datastore out could not be uploaded" in done.stderr
    assert laptop.run("job", "get", "lost").returncode != 0
    way = re.search(r"`datastore unsent (\S+)`", done.stderr)
    assert way, done.stderr
    assert laptop.run("unsent", "--save", laptop.directory / "saved", way[1]).returncode == 0
    assert (laptop.directory / "saved/late").read_text() == "precious\n"
    assert laptop.run("unsent", "--discard", "late", way[1]).returncode == 0


@promise("S-325")
def test_a_job_that_is_submitted_suspended_waits_for_resume(laptop: Laptop) -> None:
    laptop.submit(laptop.manifest("waiting", "  framework: none\n  suspend: true\n" + shell("true")))
    assert laptop.phase("waiting") == "Suspended"
    assert laptop.run("job", "resume", "waiting").returncode == 0
    laptop.until("waiting", "Succeeded")


@promise("S-325")
def test_a_finished_job_is_deleted_after_its_time_to_live(laptop: Laptop) -> None:
    spec = "  framework: none\n  ttlSecondsAfterFinished: 3\n" + shell("true")
    laptop.submit(laptop.manifest("shortlived", spec))
    laptop.until("shortlived", "Succeeded")
    eventually(lambda: "shortlived" not in laptop.run("job", "list").stdout, patience_s=PATIENCE_S)


@promise("S-326")
@pytest.mark.slow
def test_each_time_of_a_schedule_makes_a_job_of_its_own(laptop: Laptop) -> None:
    """This waits for the next full minute."""
    laptop.submit(
        laptop.manifest("hourly", "  framework: none\n  schedule: '* * * * *'\n" + shell("echo ran") + MOUNTS)
    )
    status = laptop.get("hourly")["status"]
    assert status["phase"] == "Scheduled"
    assert status["nextRun"].endswith(":00Z")
    eventually(lambda: "lastRun" in laptop.get("hourly")["status"], patience_s=PATIENCE_S)
    run = laptop.get("hourly")["status"]["lastRun"]
    assert run.startswith("hourly-2")
    laptop.until(run, "Succeeded")
    assert laptop.logs(run) == "ran\n"
    assert laptop.run("job", "suspend", "hourly").returncode == 0
    assert laptop.phase("hourly") == "Suspended"


@promise("S-331")
@pytest.mark.plain_user
def test_free_ends_everything_and_says_how_long_it_took(laptop: Laptop) -> None:
    """Also what does not listen to SIGTERM."""
    line = "trap '' TERM; echo up; while :; do sleep 1; done"
    laptop.submit(laptop.manifest("stubborn", "  framework: none\n  roles: {worker: {}}\n" + shell(line) + MOUNTS))
    eventually(lambda: laptop.logs("stubborn").count("up") == 2, patience_s=PATIENCE_S)
    done = laptop.run("job", "free", "stubborn", "-o", "json")
    assert json.loads(done.stdout)["seconds"] > GRACE_S
    assert not pids_of(laptop, "stubborn")
    found = laptop.until("stubborn", "Failed")
    assert "ended by `free`" in found["status"]["message"]
    assert laptop.logs("stubborn").count("up") == 2


@promise("S-332")
@pytest.mark.parametrize("phase", ["running", "waiting", "restarting", "finished"])
def test_a_job_deleted_in_any_phase_leaves_nothing(laptop: Laptop, phase: str) -> None:
    line = {"running": "sleep 600", "waiting": "sleep 600", "restarting": "kill -9 $$$$", "finished": "true"}[phase]
    suspended = "  suspend: true\n" if phase == "waiting" else ""
    laptop.submit(laptop.manifest("goner", f"  framework: none\n{suspended}{shell(line)}{MOUNTS}"))
    if phase in ("restarting", "finished"):
        laptop.until("goner", "Restarting" if phase == "restarting" else "Succeeded")
    assert laptop.run("job", "delete", "goner").returncode == 0
    assert gone(laptop, "goner")
    assert "there is no TrainingJob goner" in laptop.run("job", "get", "goner").stderr
    state = Path(os.environ["XDG_STATE_HOME"], "kube-datastore", "jobs")
    assert not list(state.glob("*/goner"))


@promise("S-332")
def test_a_job_outlives_the_terminal(laptop: Laptop) -> None:
    line = "until [ -e go ]; do sleep 0.1; done; echo survived"
    file = laptop.manifest("outlives", "  framework: none\n" + shell(line))
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(laptop.directory)
        os.environ.update(laptop.environment)
        command = [sys.executable, "-m", "datastore.cli", "job", "submit", "-f", str(file), "--local", "--follow"]
        os.execv(command[0], command)
    seen = b""
    deadline = time.monotonic() + PATIENCE_S
    while b"Running" not in seen and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            seen += os.read(terminal, 4096)
    os.close(terminal)  # the window is closed: SIGHUP
    os.waitpid(child, 0)
    (laptop.directory / "go").touch()
    laptop.until("outlives", "Succeeded")
    assert laptop.logs("outlives") == "survived\n"


@promise("S-332")
def test_ctrl_c_ends_the_following_and_not_the_job(laptop: Laptop) -> None:
    file = laptop.manifest("looked-at", "  framework: none\n" + shell("echo here; until [ -e go ]; do sleep 0.1; done"))
    following = laptop.start("job", "submit", "-f", file, "--local", "--follow")
    assert following.stdout is not None
    assert following.stdout.readline() == "[master-0] here\n"
    following.send_signal(signal.SIGINT)
    said = following.communicate(timeout=PATIENCE_S)[1]
    assert following.returncode == 130
    assert "looked-at continues" in said
    (laptop.directory / "go").touch()
    laptop.until("looked-at", "Succeeded")


@promise("S-332")
def test_a_reader_that_closes_its_pipe_ends_the_following_and_not_the_job(laptop: Laptop) -> None:
    """As `head` and `less` do."""
    line = "echo here; until [ -e go ]; do echo more; sleep 0.1; done"
    file = laptop.manifest("piped", "  framework: none\n" + shell(line))
    following = laptop.start("job", "submit", "-f", file, "--local", "--follow")
    assert following.stdout is not None
    assert following.stdout.readline() == "[master-0] here\n"
    following.stdout.close()
    following.stdout = None
    said = following.communicate(timeout=PATIENCE_S)[1]
    assert following.returncode == 130
    assert "piped continues" in said
    (laptop.directory / "go").touch()
    laptop.until("piped", "Succeeded")


@promise("S-332")
def test_a_job_is_deleted_while_other_commands_look_at_it(laptop: Laptop) -> None:
    """Each look for its launcher makes the file that the launcher locks."""
    manifest = load(os.fspath(laptop.manifest("doomed", "  framework: none\n  suspend: true\n  command: ['true']\n")))
    directory = directory_of("doomed", "default")
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            directory.alive  # noqa: B018

    with ThreadPoolExecutor(1) as other:
        looking = other.submit(look)
        try:
            for _ in range(50):
                LocalDriver().create(manifest.pick_job(), manifest)
                LocalDriver().delete("doomed", "default")
                assert not directory.path.exists()
        finally:
            ended.set()
        looking.result()


@contextlib.contextmanager
def silent_server() -> Iterator[socket.socket]:
    """Takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(16)
        listening.settimeout(PATIENCE_S)
        yield listening


@promise("S-332")
def test_ctrl_c_while_it_mounts_leaves_nothing(laptop: Laptop) -> None:
    with silent_server() as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        file = laptop.manifest("stuck", "  framework: none\n  command: [sh]\n" + MOUNTS)
        file.write_text(file.read_text().replace(laptop.server.endpoint, endpoint))
        submitting = laptop.start("job", "submit", "-f", file, "--local")
        state = Path(os.environ["XDG_STATE_HOME"], "kube-datastore", "jobs", "default", "stuck")
        with server.accept()[0]:  # it mounts
            assert state.exists()
            submitting.send_signal(signal.SIGINT)
            submitting.communicate(timeout=PATIENCE_S)
    assert submitting.returncode == 130
    assert not state.exists()
    assert laptop.run("job", "list").stdout.count("\n") == 1


@promise("S-333")
@pytest.mark.plain_user
def test_a_killed_launcher_takes_its_processes_along_and_is_told(laptop: Laptop) -> None:
    body = shell("echo runs; sleep 600")  # before that, its bwrap may wait for the launcher
    laptop.submit(laptop.manifest("headless", "  framework: none\n  roles: {worker: {}}\n" + body + MOUNTS))
    eventually(lambda: "runs" in laptop.logs("headless"), patience_s=PATIENCE_S)
    kill_launcher("headless")
    eventually(lambda: gone(laptop, "headless"), patience_s=PATIENCE_S)
    found = laptop.until("headless", "Failed")
    assert "its launcher was killed, or this machine went down" in found["status"]["message"]
    assert gone(laptop, "headless")
    assert cgroups_of("headless") == []


TALKING = """
import os, pathlib, socket, time
role, index = os.environ["DATASTORE_ROLE"], os.environ["DATASTORE_INDEX"]
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if role == "master":
    listening = socket.create_server((host, port))
    peer, _ = listening.accept()
    got = 0
    while chunk := peer.recv(1 << 16):
        got += len(chunk)
    print("got", got)
else:
    while True:
        try:
            peer = socket.create_connection((host, port))
            break
        except OSError:
            time.sleep(0.1)
    ballast = bytearray(100 << 20)
    for at in range(0, len(ballast), 4096):
        ballast[at] = 1
    for _ in range(20):
        peer.sendall(bytes(1 << 19))
        time.sleep(0.1)
    while time.process_time() < 1.5:
        pass
    while not pathlib.Path("go").exists():
        time.sleep(0.1)
"""
"""The worker sends, computes, and waits for a file `go` with its connection open."""


@promise("S-334")
@pytest.mark.plain_user
def test_the_usage_of_each_replica_is_measured(laptop: Laptop) -> None:
    """10 MiB go from worker to master, the worker has 100 MiB and computes."""
    spec = "  framework: pytorch\n  roles: {worker: {}}\n"
    laptop.submit(laptop.manifest("talking", spec + program(laptop, TALKING)))

    def usage() -> list[dict[str, Any]]:
        return [each.get("usage") or {} for each in laptop.get("talking")["evidence"]["replicas"]]

    def seen() -> bool:
        master, worker = usage()
        moved = min(int(master.get("receivedBytes", 0)), int(worker.get("sentBytes", 0)))
        return moved >= 10 << 20 and float(worker.get("cpuSeconds", 0.0)) >= 1.4

    eventually(seen, patience_s=PATIENCE_S)
    assert len(laptop.run("job", "top", "talking", "--once").stdout.splitlines()) == 3
    (laptop.directory / "go").touch()
    found = laptop.until("talking", "Succeeded", "Failed")
    assert found["status"]["phase"] == "Succeeded", laptop.logs("talking")
    master, worker = (each["usage"] for each in found["evidence"]["replicas"])
    assert 8 << 20 <= master["receivedBytes"] <= 11 << 20
    assert 8 << 20 <= worker["sentBytes"] <= 11 << 20
    assert worker["received"]["peak"] < 1 << 20
    assert 100 << 20 <= worker["memory"]["peak"] <= 200 << 20
    assert 1.4 <= worker["cpuSeconds"] < 3
    assert worker["cpu"]["peak"] > master["cpu"]["mean"]
    table = laptop.run("job", "get", "talking").stdout
    assert "worker-0  Succeeded  0" in table


@promise("S-329")
@pytest.mark.skipif(os.geteuid() != 0, reason="cgroups of this machine need root")
@pytest.mark.parametrize("limit", ["memory", "cpu"])
def test_limits_hold(laptop: Laptop, limit: str) -> None:
    resources = "  backoffLimit: 0\n  resources: {limits: {cpu: 250m, memory: 96Mi}}\n"
    text = "import time\nend = time.monotonic() + 3\nwhile time.monotonic() < end:\n    pass\n"
    if limit == "memory":
        text = "ballast = bytearray(400 << 20)\nfor at in range(0, len(ballast), 4096):\n    ballast[at] = 1\n"
    laptop.submit(laptop.manifest("limited", "  framework: none\n" + resources + program(laptop, text)))
    found = laptop.until("limited", "Succeeded", "Failed")
    (replica,) = found["evidence"]["replicas"]
    if limit == "memory":
        assert (replica["exitCode"], replica["reason"]) == (137, "OOMKilled")
        assert "(OOMKilled)" in found["status"]["message"]
    else:
        assert found["status"]["phase"] == "Succeeded"
        assert replica["usage"]["cpu"]["mean"] < 0.45
    assert cgroups_of("limited") == []


@promise("S-327")
def test_a_storage_that_does_not_answer_is_told_and_a_dead_mount_too(laptop: Laptop) -> None:
    """The program only hangs, or gets an error of which it can't know the cause."""
    line = "echo once > /results/here/file; while cat /results/here/file; do sleep 0.1; done; exit 1"
    name = "bereft"
    laptop.submit(laptop.manifest(name, shell(line) + MOUNTS))

    def message() -> str:
        return str(laptop.get(name)["status"].get("message"))

    os.kill(laptop.server.pid, signal.SIGSTOP)
    try:
        eventually(lambda: "Datastore out: storage has not answered since" in message(), patience_s=PATIENCE_S)
    finally:
        os.kill(laptop.server.pid, signal.SIGCONT)
    eventually(lambda: message() == "its Datastores answer again", patience_s=PATIENCE_S)
    (record,) = [each for each in all_records() if each.mountpoint.endswith(f"/{name}/mounts/out")]
    status = controlclient.status(record.state_dir)
    for each in (status["supervisorPid"], status["serverPid"]):
        os.kill(each, signal.SIGKILL)
    laptop.until(name, "Failed")
    assert message().startswith("master-0 ended with exit code 1; its log says: cat: /results/here/file: ")
    assert message().endswith("; Datastore out: its mount has crashed, and programs get errors from it")


@promise("S-338")
def test_whole_logs_go_to_a_datastore(laptop: Laptop) -> None:
    line = "i=0; while [ $i -lt 3000 ]; do echo line $i of a long log; i=$((i+1)); done"
    spec = "  framework: none\n  roles: {worker: {}}\n  logs: {datastore: out, path: logs}\n"
    laptop.submit(laptop.manifest("chatty", spec + shell(line) + MOUNTS))
    laptop.until("chatty", "Succeeded")
    body = boto_client(laptop.server).get_object(Bucket=laptop.out, Key="logs/chatty/worker-0.log")["Body"].read()
    assert body.decode() == laptop.logs("chatty", "worker")
    assert body.count(b"\n") == 3000


@promise("S-340")
def test_a_secret_of_the_file_reaches_the_environment_and_no_output(laptop: Laptop) -> None:
    env = "  env: [{name: KEY, valueFrom: {secretKeyRef: {name: keys, key: AWS_SECRET_ACCESS_KEY}}}]\n"
    laptop.submit(laptop.manifest("secretive", "  framework: none\n" + env + shell('echo "$KEY" | sha256sum')))
    laptop.until("secretive", "Succeeded")
    digest = hashlib.sha256(f"{laptop.server.secret_key}\n".encode()).hexdigest()
    assert laptop.logs("secretive") == f"{digest}  -\n"
    shown = laptop.run("job", "get", "secretive", "-o", "json").stdout + laptop.run("job", "list").stdout
    assert laptop.server.secret_key not in shown


@promise("S-341")
def test_list_and_prune(laptop: Laptop) -> None:
    for name, line in (("old", "true"), ("bad", "exit 3"), ("busy", "sleep 600")):
        laptop.submit(laptop.manifest(name, "  framework: none\n" + shell(line)))
    laptop.until("old", "Succeeded")
    laptop.until("bad", "Failed")
    eventually(lambda: [each["active"] for each in laptop.get("busy")["status"].get("roles", [])] == [1])
    listed = {each["metadata"]["name"]: each for each in json.loads(laptop.run("job", "list", "-o", "json").stdout)}
    assert {name: each["status"]["phase"] for name, each in listed.items()} == {
        "old": "Succeeded",
        "bad": "Failed",
        "busy": "Running",
    }
    assert listed["bad"]["evidence"]["replicas"][0]["exitCode"] == 3
    assert json.loads(laptop.run("job", "prune", "--since", "7d", "-o", "json").stdout) == []
    gone_ones = json.loads(laptop.run("job", "prune", "--since", "0s", "-o", "json").stdout)
    assert sorted(each["name"] for each in gone_ones) == ["bad", "old"]
    rows = laptop.run("job", "list").stdout.splitlines()
    assert rows[0].split() == ["NAME", "FRAMEWORK", "PHASE", "ROLES", "RESTARTS", "DURATION", "FREED", "WHERE"]
    assert rows[1].startswith("busy  none       Running  master 1/1")


@promise("S-341")
def test_a_job_that_is_not_there_does_not_keep_the_others_from_being_deleted(laptop: Laptop) -> None:
    for name in ("first", "last"):
        laptop.submit(laptop.manifest(name, "  framework: none\n" + shell("sleep 600")))
    done = laptop.run("job", "delete", "first", "missing", "last", "-o", "json")
    assert done.returncode == ExitCode.ERROR
    assert [each["name"] for each in json.loads(done.stdout)] == ["first", "last"]
    assert "error: there is no TrainingJob missing on this machine; it has last\n" in done.stderr
    assert json.loads(laptop.run("job", "list", "-o", "json").stdout) == []


EVENTS = """
import time
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter("/results/here/board", flush_secs=1)
for step in range(3600):
    value = Summary.Value(tag="loss", simple_value=1.0 / (step + 1))
    writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))
    writer.flush()
    time.sleep(1)
"""


@promise("S-337")
@pytest.mark.slow
def test_tensorboard_shows_what_is_being_written(laptop: Laptop) -> None:
    """It reads through the mount, while the program appends to its file; later the command shows it."""
    pytest.importorskip("tensorboard")
    spec = "  framework: none\n  tensorboard: {datastore: out, path: board}\n"
    laptop.submit(laptop.manifest("board", spec + program(laptop, EVENTS) + MOUNTS))
    url = eventually(lambda: laptop.get("board")["status"].get("tensorboard"), patience_s=PATIENCE_S)

    def steps() -> int:
        with contextlib.suppress(OSError):
            asked = f"{url}/data/plugin/scalars/scalars?tag=loss&run=."
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return len(json.loads(answer.read()))
        return 0

    eventually(lambda: steps() >= 2, patience_s=PATIENCE_S)
    first = steps()
    eventually(lambda: steps() > first, patience_s=PATIENCE_S)
    assert laptop.phase("board") == "Running"
    assert laptop.run("job", "free", "board").returncode == 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=60)
    url = f"http://127.0.0.1:{(port := free_port())}"
    later = laptop.start("job", "tensorboard", "board", "--port", str(port))
    try:
        eventually(lambda: steps() >= first, patience_s=PATIENCE_S)
    finally:
        later.send_signal(signal.SIGINT)
        _, said = later.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in said, said


BOARD = "kind: Datastore\napiVersion: datastore.dev/v1alpha1\nmetadata: {name: board}\nspec: {local: {path: %s}}\n"
WITH_BOARD = """
command: [sh, -c, 'until [ -s /board/board ]; do sleep 0.1; done; echo $MASTER_PORT >/board/task'], roles: {worker: {}},
datastores: [{name: board, path: /board}], tensorboard: {datastore: board}
"""


@promise("S-328")
def test_a_tensorboard_has_another_port_than_a_task_that_is_about_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens at the port of the task yet when chance would have it again."""
    board = tmp_path / "tensorboard"
    board.write_text("#!/bin/sh\necho $* >/board/board\nexec sleep 3600\n")
    board.chmod(0o755)
    drawn = iter(range(20_001, 32_000))
    monkeypatch.setattr("random.randrange", lambda *_: next(drawn))
    directory = directory_of("ports", "default")
    made = job(WITH_BOARD, framework="pytorch", name="ports")
    submitter = Submitter(environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"}, directory="/")
    directory.make(made, parse(BOARD % tmp_path, "ports.yaml", wanted=""), submitter)
    with watching() as watch:
        launcher = Launcher(directory, submitter, watch)
        try:
            launcher.prepare()
            drawn = iter(range(20_001, 32_000))
            assert launcher.run().phase == "Succeeded"
        finally:
            launcher.close()
            directory.remove()
    port = (tmp_path / "task").read_text().strip()
    said = (tmp_path / "board").read_text()
    assert "--port 2" in said
    assert f"--port {port} " not in said


@promise("S-333")
@pytest.mark.plain_user
def test_a_job_goes_on_while_its_state_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full for a while, in which a replica is started again, and when the job ends."""
    monkeypatch.setattr(launcher_module, "RECORD_RETRY_S", 0.01)
    write = JobDirectory.write_state
    tried = tried_at_end = 0

    def until_half_way(directory: JobDirectory, state: LocalState) -> None:
        nonlocal tried, tried_at_end
        tried += (tmp_path / "begun").exists() and not (tmp_path / "half-way").exists()
        tried_at_end += state.status.phase == "Succeeded"
        if (tmp_path / "begun").exists() and tried_at_end < 3:
            raise OSError(28, "No space left on device")
        write(directory, state)

    monkeypatch.setattr(JobDirectory, "write_state", until_half_way)
    line = "[ -e begun ] && sleep 2 && touch half-way && exit 0; touch begun; sleep 1; exit 137"
    directory = directory_of("full", "default")
    submitter = Submitter(environment={"PATH": os.environ["PATH"]}, directory=str(tmp_path))
    made = job(f"command: [sh, -c, '{line}']", framework="none", name="full")
    directory.make(made, parse("", "full.yaml", wanted=""), submitter)
    with watching() as watch:
        launcher = Launcher(directory, submitter, watch)
        try:
            launcher.prepare()
            assert launcher.run().phase == "Succeeded"
        finally:
            launcher.close()
    assert tried > 1
    assert tried_at_end == 3
    status = directory.read_state().status
    assert (status.phase, status.restarts) == ("Succeeded", 1)
    directory.remove()
