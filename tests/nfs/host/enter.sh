#!/bin/sh
# The first program of a guest. Its root is this machine's whole file system, read-only (hostfs); it goes on in the
# guest's own root (/dev/ubda), where /usr is the packages of the guest over this machine's, and everything else of this
# machine is at the same path as here, read-only.
set -eu
PATH=/usr/sbin:/usr/bin:/sbin:/bin:$GUEST_PACKAGES/usr/sbin
export PATH
mount -t proc proc /proc
LD_LIBRARY_PATH=$GUEST_PACKAGES/usr/lib/x86_64-linux-gnu modprobe -d "$GUEST_PACKAGES" overlay
mount -t ext4 /dev/ubda /mnt
mount -t overlay usr /mnt/usr -o "lowerdir=$GUEST_PACKAGES/usr:/usr"
cd /mnt
pivot_root . host
exec chroot . /bin/sh /etc/start.sh
