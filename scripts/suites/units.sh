# What the units of systemd do, in a bare Debian with the package, which systemd has booted.
# shellcheck shell=sh

dpkg --install /root/ferryfs.deb
daemon() { ferry stats "$1" --json | sed -n 's/.*"daemon": *\([0-9]*\).*/\1/p'; }
program() { readlink "/proc/$(daemon "$1")/exe"; }
# settings NAME: of this unit, from the input.
settings() {
  mkdir -p "/mnt/$1"
  { echo "MOUNTPOINT=/mnt/$1"; cat; } >"/etc/ferryfs/$1.conf"
}
killed() { kill -9 "$(daemon "$1")"; }
newer() {
  cp /usr/bin/ferry /usr/bin/ferry.other
  mv /usr/bin/ferry.other /usr/bin/ferry
}
units() { systemctl show --property=NRestarts,ActiveState "$1" | xargs; }

# A mount with an open file, over everything that systemd does but a stop.
ferry mkfs /srv/unit.ferry --size 1G
echo VOLUME=/srv/unit.ferry | settings data
systemctl start ferry@data
mountpoint -q /mnt/data
exec 3>>/mnt/data/open
echo begun >&3
killed /mnt/data
echo killed >&3
newer
test "$(program /mnt/data)" = "/usr/bin/ferry (deleted)"
systemctl restart ferry@data
test "$(program /mnt/data)" = /usr/bin/ferry
# More often than systemd lets a unit start within 10 s by default.
for _ in 1 2 3 4 5 6; do systemctl restart ferry@data; done
echo ended >&3
test "$(xargs </mnt/data/open)" = 'begun killed ended'
exec 3>&-
# Its main process has the connection: what is not durable ends with it.
sync /mnt/data/open
kill -9 "$(systemctl show --property=MainPID --value ferry@data)"
while [ "$(units ferry@data)" != 'NRestarts=1 ActiveState=active' ]; do sleep 0.1; done
test "$(xargs </mnt/data/open)" = 'begun killed ended'
# With other settings it is made anew.
test -z "$(mount | grep cache=strict)"
printf 'VOLUME=/srv/unit.ferry\nOPTIONS=cache=strict\n' | settings data
systemctl restart ferry@data
mount | grep cache=strict
# Or at another directory.
sed -i s,/mnt/data,/mnt/other, /etc/ferryfs/data.conf
mkdir /mnt/other
systemctl restart ferry@data
test "$(xargs </mnt/other/open)" = 'begun killed ended'
test -z "$(grep /mnt/data /proc/self/mounts)"
# A start that fails leaves the mount to the next one.
mkdir /etc/systemd/system/ferry@data.service.d
printf '[Service]\nExecStartPre=/usr/bin/test ! -e /root/fails\n' >/etc/systemd/system/ferry@data.service.d/fails.conf
systemctl daemon-reload
mkfifo /root/go
{
  read -r _ </root/go
  echo again
} >>/mnt/other/open &
sleep 0.5
touch /root/fails
systemctl restart ferry@data && exit 1
rm /root/fails
while [ "$(systemctl is-active ferry@data)" != active ]; do sleep 0.1; done
echo >/root/go
wait
test "$(xargs </mnt/other/open)" = 'begun killed ended again'
# Starts in quick succession: a start that is ended goes on with nothing, and the next one does.
exec 3>>/mnt/other/open
for pause in 0.05 0.1 0.15 0.2 0.3; do
  systemctl restart ferry@data &
  sleep $pause
  systemctl restart ferry@data
  wait
  echo quick >&3
done
exec 3>&-
test "$(grep -c quick /mnt/other/open)" = 5
sed -i /quick/d /mnt/other/open
# left: the mount is left to a start that fails. comes: the next one succeeds.
left() {
  touch /root/fails
  ! systemctl restart ferry@data
}
comes() {
  rm /root/fails
  while [ "$(systemctl is-active ferry@data)" != active ]; do sleep 0.1; done
  test "$(xargs </mnt/other/open)" = 'begun killed ended again'
}
# What was left is unmounted meanwhile.
left
umount -l /mnt/other
comes
# Another mount may have the number of its connection then.
left
umount -l /mnt/other
ferry mkfs /srv/stranger.ferry --size 128M
mkdir /mnt/stranger
ferry mount /srv/stranger.ferry /mnt/stranger
echo stranger >/mnt/stranger/file
echo OPTIONS=noatime >>/etc/ferryfs/data.conf
comes
test "$(cat /mnt/stranger/file)" = stranger
ferry umount /mnt/stranger
# Others have changed the volume meanwhile: the mount of before ends, and a new one comes.
left
ferry mount /srv/unit.ferry /mnt/stranger
echo changed >/mnt/stranger/changed
ferry umount /mnt/stranger
comes
test "$(cat /mnt/other/changed)" = changed
# Who asks the daemon to leave is killed before that has: the mount ends, and a new one comes.
stopped=$(daemon /mnt/other)
kill -STOP "$stopped"
systemctl restart --no-block ferry@data
asks() { grep -la upgrade-mount /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3; }
while ! asks | grep -q .; do sleep 0.1; done
sleep 1
for process in $(asks); do kill -9 "$process" || true; done
sleep 0.5
kill -CONT "$stopped"
while [ -e "/proc/$stopped" ] || [ "$(systemctl is-active ferry@data)" != active ]; do sleep 0.1; done
mountpoint -q /mnt/other
# systemd has no room for the mount.
printf '[Service]\nFileDescriptorStoreMax=0\n' >/etc/systemd/system/ferry@data.service.d/room.conf
systemctl daemon-reload
systemctl restart ferry@data
mountpoint -q /mnt/other
rm /etc/systemd/system/ferry@data.service.d/room.conf
systemctl daemon-reload
systemctl restart ferry@data
# The mount point has another name.
ln -s /mnt /root/mnt
sed -i s,=/mnt/other,=/root/mnt/other/, /etc/ferryfs/data.conf
systemctl restart ferry@data
exec 3>>/mnt/other/named
systemctl restart ferry@data
echo named >&3
exec 3>&-
sed -i s,=/root/mnt/other/,=/mnt/other, /etc/ferryfs/data.conf
systemctl restart ferry@data
test "$(cat /mnt/other/named)" = named
# If it is stopped before, the volume is closed all the same.
touch /root/fails
systemctl restart ferry@data && exit 1
systemctl stop ferry@data
ferry fsck /srv/unit.ferry
rm /root/fails
systemctl start ferry@data
test "$(xargs </mnt/other/open)" = 'begun killed ended again'
systemctl stop ferry@data
test -z "$(grep /srv/unit /proc/self/mounts)"
test -z "$(ls -l /proc/[0-9]*/exe 2>/dev/null | grep /ferry)"
ferry fsck /srv/unit.ferry

# A server and its mount.
echo VOLUME=/srv/unit.ferry SERVE_OPTIONS=--insecure | xargs -n1 | settings data
printf 'VOLUME=ferry://127.0.0.1/\nOPTIONS=insecure\n' | settings remote
systemctl start ferry-serve@data
systemctl start ferry@remote
mountpoint -q /mnt/remote
exec 3>>/mnt/remote/open
echo server >&3
systemctl restart ferry-serve@data
echo client >&3
systemctl restart ferry@remote
killed /mnt/remote
echo both >&3
test "$(xargs </mnt/remote/open)" = 'begun killed ended again server client both'
exec 3>&-
systemctl stop ferry@remote ferry-serve@data
ferry fsck /srv/unit.ferry

# A volume in a store, and its snapshots.
ferry mkfs dir:///srv/store --size 1G
printf 'VOLUME=dir:///srv/store\n' | settings store
systemctl start ferry@store
echo hello >/mnt/store/file
systemctl start ferry-snapshot@store
test "$(ferry snapshot list /mnt/store | wc -l)" = 1
systemctl stop ferry@store
systemctl start ferry-snapshot@store
test "$(ferry snapshot list dir:///srv/store | wc -l)" = 1
test -z "$(systemctl --failed --no-legend)"
