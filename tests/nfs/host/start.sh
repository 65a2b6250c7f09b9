# Process 1 of a guest, in its own root: brings up the network and what its role serves, says READY on the console, and
# collects orphans. The kernel passes what stands as NAME=VALUE on its command line in the environment:
# GUEST_ROLE (server or client), GUEST_ADDRESS (with its prefix length), GUEST_SHOW (paths of the machine that it must see).
export PATH=/usr/sbin:/usr/bin HOME=/root LANG=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run
mount -t tmpfs tmp /tmp
# The machine's directories at the same paths, unless the guest has its own; 0701 tells one that was made for it, also after
# the guest has started anew. All of them by four programs, not four for each: an emulated machine takes its time.
here=$(for path in /host/*; do [ -d "$path" ] && [ ! -L "$path" ] && echo "/${path#/host/}"; done)
mkdir -p -m 0701 $here
stat -c '%a %n' $here | sed -n 's,^701 \(.*\),/host\1 \1 none bind,p' >/run/fstab
mount -a -T /run/fstab
for path in $(echo "$GUEST_SHOW" | tr : ' '); do
    [ -e "$path" ] || mkdir -p -m 0701 "$path"
    [ "$(stat -c %a "$path")" != 701 ] || mount --bind "/host$path" "$path"
done
mkdir -p /run/sshd /run/rpcbind /run/lock
hostname "nfs-$GUEST_ROLE"
ip link set lo up
ip address add "$GUEST_ADDRESS" dev vec0
ip link set vec0 up

if [ "$GUEST_ROLE" = server ]; then
    mount -t xfs -o prjquota /dev/ubdb /srv
    rpcbind -w
    modprobe nfsd
    mkdir -p /run/rpc_pipefs /var/lib/nfs/nfsdcld
    mount -t rpc_pipefs rpc_pipefs /run/rpc_pipefs
    # Without it nobody knows the clients of before, and each start would be followed by a grace period of ten seconds, in
    # which nobody opens a file; with it that ends when the last of them has its files back. Servers run it (nfsdcld(8)).
    nfsdcld -p /run/rpc_pipefs
    mount -t nfsd nfsd /proc/fs/nfsd
    echo 1048576 >/proc/fs/nfsd/max_block_size # by itself it would take 1/4096 of this small memory
    exportfs -ar
    rpc.mountd # before nfsd, as nfs-server.service has it: without mountd the kernel refuses every client
    rpc.nfsd --grace-time 10 --lease-time 10 8
else
    modprobe -a nfs nfsv3 nfsv4 fuse
    rpcbind -w
    rpc.statd --no-notify
fi
/usr/sbin/sshd
echo "READY after $(cut -d ' ' -f 1 /proc/uptime) s"
while :; do wait; sleep 1; done
