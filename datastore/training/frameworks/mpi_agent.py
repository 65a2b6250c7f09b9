"""Starts the processes of an MPI job on other hosts, in place of ssh. This file uses nothing else of the project, so
that the python3 of any image, from 3.8, can run it.

    python3 mpi_agent.py --serve INDEX         in a worker: wait for the master, run the commands that it sends
    python3 mpi_agent.py HOST COMMAND ...      in place of ssh: run a command there, with its output and exit code

The caller proves that it knows DATASTORE_TOKEN: the worker sends 32 random bytes and receives their HMAC-SHA256. After
that each side sends frames: a letter (c command, o output, x exit code), the length in four bytes (big-endian), data.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress

HOSTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hosts")
CONNECT_TIMEOUT_S = 300.0
HELLO_TIMEOUT_S = 60.0
RELAY_LOOK_S = 0.2
RELAY_TIMEOUT_S = 60.0
MAX_FRAME = 1 << 20


def places() -> list[tuple[str, str, int]]:
    """Return where the workers listen, by index: name, host, port."""
    with open(HOSTS) as file:
        return [(name, host, int(port)) for name, host, port in (line.split() for line in file)]


def proof(challenge: bytes) -> bytes:
    """Return the answer to a challenge, which only the job's own tasks can compute."""
    return hmac.new(os.environ["DATASTORE_TOKEN"].encode(), challenge, hashlib.sha256).digest()


def receive(connection: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes. Errors: ConnectionError when the connection ends before."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the other side went away")
        data += more
    return data


def send(connection: socket.socket, letter: bytes, data: bytes) -> None:
    """Send one frame."""
    connection.sendall(letter + struct.pack(">I", len(data)) + data)


def next_frame(connection: socket.socket) -> tuple[bytes, bytes]:
    """Receive the letter and the data of the next frame."""
    letter, length = struct.unpack(">cI", receive(connection, 5))
    if length > MAX_FRAME:
        raise ConnectionError("a frame is too long")
    return letter, receive(connection, length)


def serve(index: int) -> None:
    """Run the commands that callers send, until this process is ended."""
    _, host, port = places()[index]
    listening = socket.socket(socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1" if host.startswith("127.") else "", port))
    listening.listen(8)
    print("ready for the master", flush=True)
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


def answer(connection: socket.socket) -> None:
    """Serve one caller; refuse a caller that does not know the token."""
    try:
        connection.settimeout(HELLO_TIMEOUT_S)
        challenge = os.urandom(32)
        connection.sendall(challenge)
        if not hmac.compare_digest(receive(connection, 32), proof(challenge)):
            raise ConnectionError("a caller does not know the token of this job")
        command = next_frame(connection)[1].decode()
        connection.settimeout(None)
        run(connection, command)
    except (OSError, KeyError, struct.error) as error:
        print(f"refused: {error}", flush=True)
    finally:
        connection.close()


def run(connection: socket.socket, command: str) -> None:
    """Run a command in a shell, as ssh would, and send its output and exit code; end it if the caller disconnects."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    ended = threading.Event()
    relay = threading.Thread(target=forward, args=(process, connection, ended), daemon=True)
    relay.start()
    watch = threading.Thread(target=end_with, args=(connection, process), daemon=True)
    watch.start()
    code = process.wait()
    ended.set()
    relay.join(RELAY_TIMEOUT_S)
    send(connection, b"x", struct.pack(">i", code))


def forward(process: subprocess.Popen[bytes], connection: socket.socket, ended: threading.Event) -> None:
    """Send what the command prints, until it has ended and the pipe is empty: background processes may hold it open."""
    assert process.stdout is not None
    with suppress(OSError), process.stdout:
        while True:
            over = ended.is_set()
            if select.select([process.stdout], [], [], RELAY_LOOK_S)[0]:
                data = os.read(process.stdout.fileno(), 65536)
                if not data:
                    return
                send(connection, b"o", data)
            elif over:
                return


def end_with(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Wait until the caller disconnects, as it sends nothing more, and end the command if it still runs."""
    with suppress(OSError):
        while connection.recv(1):
            pass
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


def connect(name: str) -> socket.socket:
    """Connect to the agent of a host; try again for CONNECT_TIMEOUT_S, as it may not run yet."""
    # Open MPI passes the name without its domain.
    where = [(host, port) for each, host, port in places() if name in (each, each.partition(".")[0])]
    if not where:
        sys.exit(f"mpi_agent: no worker of this job is called {name}")
    deadline = time.time() + CONNECT_TIMEOUT_S
    while True:
        try:
            return socket.create_connection(where[0], timeout=HELLO_TIMEOUT_S)
        except OSError as error:
            if time.time() > deadline:
                sys.exit(f"mpi_agent: {name} does not answer: {error}")
            time.sleep(0.1)


def ask(name: str, words: list[str]) -> int:
    """Run a command on a host, write its output, and return its exit code, as a shell counts."""
    connection = connect(name)
    connection.sendall(proof(receive(connection, 32)))
    send(connection, b"c", " ".join(words).encode())
    connection.settimeout(None)
    while True:
        letter, data = next_frame(connection)
        if letter == b"x":
            code: int = struct.unpack(">i", data)[0]
            return code if code >= 0 else 128 - code
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def main(arguments: list[str]) -> None:
    """Run one of the two commands in the module's docstring; options of ssh are skipped."""
    if arguments[:1] == ["--serve"]:
        serve(int(arguments[1]))
    while arguments and arguments[0].startswith("-"):
        arguments = arguments[2:] if arguments[0] in ("-l", "-p", "-o", "-i") else arguments[1:]
    if len(arguments) < 2:
        sys.exit("usage: mpi_agent.py HOST COMMAND ...")
    try:
        sys.exit(ask(arguments[0], arguments[1:]))
    except (ConnectionError, OSError) as error:
        sys.exit(f"mpi_agent: {arguments[0]}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
