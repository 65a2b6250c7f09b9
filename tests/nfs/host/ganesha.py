"""NFS-Ganesha in a guest, over a directory of its own disk: another server than the kernel's, with the same calls."""

from __future__ import annotations

from tests.nfs.host.guest import Guest
from tests.patience import eventually

CONFIGURATION = """\
NFS_CORE_PARAM {{
    Protocols = 3, 4;
    Enable_NLM = false;
    Enable_RQUOTA = false;
    Enable_UDP = false;
    mount_path_pseudo = true;
}}
NFSV4 {{ RecoveryBackend = fs; RecoveryRoot = /var/lib/nfs/ganesha; Graceless = true; Only_Numeric_Owners = true; }}
EXPORT {{
    Export_Id = 77;
    Filesystem_Id = 77.77;
    Path = {path};
    Pseudo = {path};
    Access_Type = RW;
    Squash = No_Root_Squash;
    SecType = sys;
    FSAL {{ Name = VFS; }}
}}
"""


LOG, IMAGE = "/var/log/ganesha.log", "/var/tmp/claim"


class Ganesha:
    """One server. guest: it must not run another one."""

    def __init__(self, guest: Guest, path: str = "/srv/ganesha") -> None:
        self.guest = guest
        self.path = path

    @property
    def address(self) -> str:
        """Of the guest."""
        return self.guest.address

    def claim(self, size: int) -> None:
        """Before the first start: have a file system of its own at the path, as the claim of a pod is."""
        self.guest.shell(
            f"modprobe loop; truncate -s {size} {IMAGE}; mke2fs -q -F -t ext4 {IMAGE}\n"
            f"mkdir -p {self.path}; mount -o loop {IMAGE} {self.path}"
        )

    def grow(self, size: int) -> None:
        """Enlarge that file system under whoever uses it."""
        loop = f"$(losetup --noheadings --output NAME --associated {IMAGE})"
        self.guest.shell(f"truncate -s {size} {IMAGE}; losetup --set-capacity {loop}; resize2fs {loop} >/dev/null")

    def start(self) -> None:
        """Start it, and wait until it shows its export."""
        self.guest.shell(f"mkdir -p -m 0777 {self.path}; chmod 0777 {self.path}")
        self.launch(CONFIGURATION.format(path=self.path))
        said = f"showmount --no-headers --exports localhost | grep -q '^{self.path} '"
        eventually(
            lambda: self.guest.run("sh", "-c", f"{said} && echo yes || true").strip() == "yes", "Ganesha serves", 300.0
        )

    def launch(self, configuration: str) -> None:
        """Start it with any configuration."""
        self.guest.run("tee", "/etc/ganesha.conf", text=configuration)
        self.guest.shell(
            f"mkdir -p /var/lib/nfs/ganesha /run/ganesha; rm -f {LOG}\n"
            f"ganesha.nfsd -f /etc/ganesha.conf -L {LOG} -p /run/ganesha.pid -N NIV_EVENT"
        )

    def complaints(self) -> list[str]:
        """What it says of its configuration since it was started, but for a library that it does not need."""
        said = self.guest.shell(f"grep ':CONFIG :' {LOG} || true").splitlines()
        return [line for line in said if ":EVENT :" not in line and "load_rados_config" not in line]

    def stop(self) -> None:
        """End it in order."""
        self.guest.shell("kill $(cat /run/ganesha.pid); while pidof ganesha.nfsd >/dev/null; do sleep 0.05; done")

    def kill(self) -> None:
        """End it at once, if it runs."""
        self.guest.shell("kill -9 $(cat /run/ganesha.pid) || true")
        self.guest.shell("while pidof ganesha.nfsd >/dev/null; do sleep 0.05; done")
