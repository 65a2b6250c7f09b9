"""One guest: its disks, its boot and its end, and commands in it over ssh."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.nfs.host.network import Network
from tests.patience import eventually

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[2]
BOOT_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 180.0
HANG_UP_TIMEOUT_S = 60.0
"""Seconds on a quiet machine. These only end hangs."""
RECOVERED_S = 400.0
"""For a kernel's NFS client to find its server again: its pauses double, to as long again as the outage was."""
MEMORY = {"server": "448M", "client": "768M"}
"""By role. In the client a mount has a limit of 416 MiB, which is to be met before the guest's own."""
ROOT_BYTES = 256 << 20
SERVED_BYTES = 8 << 30
"""Of the disk that is served; sparse."""
PASSWD = """\
root:x:0:0:root:/root:/bin/sh
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
sshd:x:101:65534::/run/sshd:/usr/sbin/nologin
_rpc:x:102:65534::/run/rpcbind:/usr/sbin/nologin
statd:x:103:65534::/var/lib/nfs:/usr/sbin/nologin
alice:x:1001:1001:Alice:/:/bin/sh
"""
GROUP = "root:x:0:\ndaemon:x:1:\nnogroup:x:65534:\nalice:x:1001:\n"
SSHD = """\
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
StrictModes no
MaxStartups 100
Subsystem sftp /usr/lib/openssh/sftp-server
"""


@dataclass(slots=True)
class Guest:
    """role: 'server' or 'client', which is its tap device's name too. directory: where its disks and its log are."""

    role: str
    address: str
    network: Network
    directory: Path
    packages: Path
    process: subprocess.Popen[bytes] | None = None
    """Its kernel, where this process started it."""

    # -- making it

    def prepare(self) -> None:
        """Make its disks and its keys."""
        self.directory.mkdir(mode=0o700, parents=True)
        self._key("id")
        self._key("host_key")
        host_key = " ".join((self.directory / "host_key.pub").read_text().split()[:2])
        (self.directory / "known_hosts").write_text(f"{self.address} {host_key}\n")
        with tempfile.TemporaryDirectory(dir=self.directory) as skeleton:
            self._fill(Path(skeleton))
            self._disk("root.disk", ROOT_BYTES, "mke2fs", "-q", "-F", "-t", "ext4", "-d", skeleton)
        if self.role == "server":
            libraries = f"{self.packages}/usr/lib/x86_64-linux-gnu:{self.packages}/usr/lib/aarch64-linux-gnu"
            make = ("env", f"LD_LIBRARY_PATH={libraries}", str(self.packages / "usr/sbin/mkfs.xfs"), "-q", "-f")
            self._disk("served.disk", SERVED_BYTES, *make)

    def _key(self, name: str) -> None:
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(self.directory / name)]
        subprocess.run(command, check=True, timeout=COMMAND_TIMEOUT_S)

    def _disk(self, name: str, size: int, *make: str) -> None:
        disk = self.directory / name
        with disk.open("wb") as file:
            file.truncate(size)
        subprocess.run([*make, str(disk)], check=True, capture_output=True, timeout=COMMAND_TIMEOUT_S)

    def _fill(self, root: Path) -> None:
        """The guest's own root, the rest of which is mounted when it starts."""
        root.chmod(0o755)
        for name in ("bin", "sbin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        made = ("dev", "etc/exports.d", "etc/ssh", "host", "mnt", "proc", "run", "srv", "sys", "tmp", "usr")
        for name in (*made, "var/lib/nfs/sm", "var/lib/nfs/v4recovery", "var/log", "var/tmp"):
            (root / name).mkdir(parents=True)
        for name in ("etab", "rmtab", "state"):
            (root / "var/lib/nfs" / name).touch()
        (root / "var/lib/nfs/sm.bak").mkdir()
        etc = root / "etc"
        for name in ("netconfig", "protocols", "rpc", "services"):
            packaged = self.packages / "etc" / name
            shutil.copy(packaged if packaged.exists() else Path("/etc", name), etc / name)
        for name in ("alternatives", "ssl"):
            (etc / name).symlink_to(f"/host/etc/{name}")
        (etc / "mtab").symlink_to("/proc/self/mounts")
        (root / "var/run").symlink_to("/run")
        for name, text in {
            "exports": "",
            "fstab": "",
            "group": GROUP,
            "hosts": "127.0.0.1 localhost\n",
            "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
            "passwd": PASSWD,
            "projects": "",
            "projid": "",
            "ssh/sshd_config": SSHD,
        }.items():
            (etc / name).write_text(text)
        shutil.copy(self.directory / "host_key", etc / "ssh/host_key")
        (etc / "ssh/host_key").chmod(0o600)
        shutil.copy(self.directory / "id.pub", etc / "ssh/authorized_keys")
        for name in ("start.sh", "stop.sh"):
            shutil.copy(HERE / name, etc / name)

    # -- its life

    @property
    def log(self) -> Path:
        """What its console said since its last start."""
        return self.directory / "console.log"

    def start(self) -> None:
        """Switch it on; ready() waits for it."""
        disks = [f"ubda={self.directory / 'root.disk'}"]
        if self.role == "server":
            disks.append(f"ubdb={self.directory / 'served.disk'}")
        shown = (CHECKOUT, Path(os.path.realpath(CHECKOUT / ".venv/bin/python")).parents[1])
        command = [
            *(str(self.packages / "usr/bin/linux.uml"), f"mem={MEMORY[self.role]}", *disks),
            *("root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={HERE / 'enter.sh'}"),
            *(f"vec0:transport=tap,ifname={self.role},depth=128,gro=1,mac={self._mac()}", "con=null", "con0=null,fd:1"),
            *("raid=noautodetect", "quiet", "panic=-1", f"umid={self.role}", f"uml_dir={self.directory}/"),
            *(f"GUEST_PACKAGES={self.packages}", f"GUEST_ROLE={self.role}"),
            *(f"GUEST_ADDRESS={self.address}/24", f"GUEST_SHOW={':'.join(map(str, shown))}"),
        ]
        preloaded = self.directory / "xstate.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", preloaded, HERE / "xstate.c"], check=True, timeout=60)
        with self.log.open("wb") as console:
            self.process = subprocess.Popen(
                self.network.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # its memory is a file there
                env={**os.environ, "TMPDIR": "/dev/shm", "LD_PRELOAD": str(preloaded)},
            )
        (self.directory / "pid").write_text(str(self.process.pid))

    def ready(self) -> None:
        """Wait until it serves. Errors: AssertionError with the end of its console's log."""

        def said() -> bool:
            text = self.log.read_text(errors="replace")
            assert self.runs(), f"the {self.role} ended while it started:\n{text[-2000:]}"
            return "\nREADY after" in text

        eventually(said, f"the {self.role} is up; see {self.log}", BOOT_TIMEOUT_S)
        eventually(lambda: not self._ssh("true", COMMAND_TIMEOUT_S).returncode, f"the {self.role} answers by ssh")

    def runs(self) -> bool:
        """Whether its kernel lives."""
        if self.process is not None:
            return self.process.poll() is None
        try:
            return str(self.directory).encode() in Path(f"/proc/{self._pid()}/cmdline").read_bytes()
        except OSError:
            return False

    def stop(self) -> None:
        """Switch it off in order: it unexports, unmounts and ends; by force when that takes too long."""
        if self.runs():
            self._ssh("sh /etc/stop.sh </dev/null >/dev/console 2>&1 &", STOP_TIMEOUT_S)
            end = time.monotonic() + STOP_TIMEOUT_S
            while self.runs() and time.monotonic() < end:
                time.sleep(0.02)
        self.cut_power()

    def cut_power(self) -> None:
        """End it at once: what it had not written to its disks is lost. Idempotent."""
        if self.runs():
            os.killpg(self._pid(), signal.SIGKILL)
            eventually(lambda: not self.runs(), f"the {self.role} is gone", STOP_TIMEOUT_S)
        self._hang_up()

    def reboot(self, *, orderly: bool = True) -> None:
        """Off and on again, until it serves."""
        if orderly:
            self.stop()
        else:
            self.cut_power()
        self.start()
        self.ready()

    def _mac(self) -> str:
        """The same after each start, so that its neighbours find it at once."""
        return f"02:00:00:00:00:{int(self.address.rpartition('.')[2]):02x}"

    def _pid(self) -> int:
        try:
            return int((self.directory / "pid").read_text())
        except FileNotFoundError:
            return 0

    # -- commands in it

    def run(self, *words: str, text: str = "", timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run a command, with `text` on its standard input; what it wrote.

        Errors: AssertionError with what it said when its exit code is not 0.
        """
        done = self._ssh(shlex.join(words), timeout_s, text)
        assert done.returncode == 0, f"{shlex.join(words)} on the {self.role}: {done.returncode}: {done.stderr}"
        return done.stdout

    def shell(self, script: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run a script of the shell, which stops at the first command that fails; otherwise as run()."""
        return self.run("sh", "-eu", text=script, timeout_s=timeout_s)

    def stuck(self, script: str) -> None:
        """Start a script and leave it behind where the kernel holds it, since a server that it needs is away."""
        pid = self.shell(f"({script}) >/dev/null 2>&1 & echo $!").strip()
        waits = f"ps -o stat= --pid {pid} --ppid {pid} | grep -q '^D'"
        look = f"if {waits} && sleep 0.2 && {waits}; then echo yes; fi"
        eventually(lambda: self.shell(look), f"{script} waits in the kernel of the {self.role}")

    def ssh_command(self) -> list[str]:
        """The beginning of a command line that runs something in it, from any network namespace."""
        options = {
            "UserKnownHostsFile": str(self.directory / "known_hosts"),
            "StrictHostKeyChecking": "yes",
            "IdentitiesOnly": "yes",
            "ConnectTimeout": "30",
            "ServerAliveInterval": "15",
            "ServerAliveCountMax": "8",
            # One connection for all commands: a new one costs an emulated machine half a second.
            "ControlMaster": "auto",
            "ControlPath": str(self.directory / "ssh.sock"),
            "ControlPersist": "600",
            "LogLevel": "ERROR",
        }
        named = [word for name, setting in options.items() for word in ("-o", f"{name}={setting}")]
        return self.network.command(
            "ssh", "-F", "none", "-i", str(self.directory / "id"), *named, f"root@{self.address}"
        )

    def _ssh(self, line: str, timeout_s: float, text: str = "") -> subprocess.CompletedProcess[str]:
        # Files, not pipes: the connection's process inherits them and lives longer.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            try:
                done = subprocess.run(
                    [*self.ssh_command(), line],
                    input=text.encode(),
                    stdout=out,
                    stderr=err,
                    timeout=timeout_s,
                    check=False,
                )
                code = done.returncode
            except subprocess.TimeoutExpired:
                code = -1
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(line, code, out.read(), err.read() or "no answer in time")

    def _hang_up(self) -> None:
        """End the connection that is kept for commands."""
        if (self.directory / "ssh.sock").exists():
            command = self.ssh_command()
            subprocess.run(
                [*command[:-1], "-O", "exit", command[-1]], capture_output=True, timeout=HANG_UP_TIMEOUT_S, check=False
            )
            (self.directory / "ssh.sock").unlink(missing_ok=True)
