# An orderly end of a guest: its server, as Debian's unit has it (clients of a server without exports would be refused), then the power.
rpc.nfsd 0
exportfs -ua
sync
umount /srv
echo s >/proc/sysrq-trigger
echo u >/proc/sysrq-trigger
echo o >/proc/sysrq-trigger
