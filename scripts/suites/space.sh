# No room left, and ways to mount; sourced by scripts/test.
# shellcheck shell=bash

# fill DIRECTORY: writes until it says ENOSPC; each file that was closed and synced without an error
# is then there in full.
fill() {
  local n=0 code
  while :; do
    n=$((n + 1)); code=0
    dd if=/dev/urandom of="$1/fill.$n" bs=256k count=16 status=none conv=fsync 2>"$scratch/dd.log" || code=$?
    if [ "$code" != 0 ]; then
      grep -q 'No space left on device' "$scratch/dd.log" || { cat "$scratch/dd.log"; return 1; }
      rm -f "$1/fill.$n"
      break
    fi
    md5sum "$1/fill.$n" >>"$scratch/fill.md5"
    [ "$n" -lt 4000 ]
  done
  say "full after $n files"
  [ "$n" -gt 2 ]
}

# Written files are still right, removing works although it is full, and the room can be used
# again.
survive_being_full() {
  : >"$scratch/fill.md5"
  fill "$scratch/mnt"
  md5sum --quiet -c "$scratch/fill.md5"
  # Names alone need room too; they end with the same error, and go again.
  local n=0
  while mkdir "$scratch/mnt/dir.$n" 2>/dev/null && [ "$n" -lt 3000 ]; do n=$((n + 1)); done
  rm -rf "$scratch"/mnt/*
  "$ferry" sync "$scratch/mnt"
  : >"$scratch/fill.md5"
  fill "$scratch/mnt"
  md5sum --quiet -c "$scratch/fill.md5"
  unmount_volume "$scratch/mnt"
  timeout 100 "$ferry" fsck "$1"
  timeout 60 "$ferry" mount "$1" "$scratch/mnt"
  md5sum --quiet -c "$scratch/fill.md5"
  rm -rf "$scratch"/mnt/*
  unmount_volume "$scratch/mnt"
  timeout 100 "$ferry" fsck "$1"
}

full_volume() {
  timeout 60 "$ferry" mkfs "$scratch/small.ferry" --size 96M
  mount_volume "$scratch/small.ferry" "$scratch/mnt"
  survive_being_full "$scratch/small.ferry"
}

# ends_with_enospc SECONDS COMMAND…: it fails in this time, and says why.
ends_with_enospc() {
  local limit=$1 code=0; shift
  timeout "$limit" "$@" 2>"$scratch/full.log" || code=$?
  cat "$scratch/full.log"
  [ "$code" = 1 ] || { echo "exit code $code"; return 1; }
  grep 'No space left on device' "$scratch/full.log"
}

# The kernel takes writes that do not fit: a program that only writes hears of it soon, one that
# closes at the close; room comes back.
full_behind_writeback() {
  timeout 60 "$ferry" mkfs "$scratch/behind.ferry" --size 96M
  mount_volume "$scratch/behind.ferry" "$scratch/mnt" cache=writeback
  ends_with_enospc 60 dd if=/dev/zero of="$scratch/mnt/endless" bs=1M
  grep 'error writing' "$scratch/full.log"
  ends_with_enospc 60 dd if=/dev/zero of="$scratch/mnt/synced" bs=64k count=100 conv=fsync
  head -c 3M /dev/zero >"$scratch/three"
  ends_with_enospc 60 cp "$scratch/three" "$scratch/mnt/copy"
  stat "$scratch/mnt/endless"
  rm "$scratch"/mnt/*
  dd if=/dev/urandom of="$scratch/mnt/again" bs=1M count=20 conv=fsync status=none
  md5sum "$scratch/mnt/again" >"$scratch/behind.md5"
  unmount_volume "$scratch/mnt"
  timeout 60 "$ferry" fsck "$scratch/behind.ferry"
  mount_volume "$scratch/behind.ferry" "$scratch/mnt"
  md5sum --quiet -c "$scratch/behind.md5"
  unmount_volume "$scratch/mnt"
}

# The volume is larger than the disk below it.
full_host() {
  truncate -s 200M "$scratch/host.img"
  mkfs.ext4 -q "$scratch/host.img"
  mkdir -p "$scratch/small-host"
  mount -o loop "$scratch/host.img" "$scratch/small-host"
  timeout 60 "$ferry" mkfs "$scratch/small-host/big.ferry" --size 10G --log-size 16M
  mount_volume "$scratch/small-host/big.ferry" "$scratch/mnt"
  survive_being_full "$scratch/small-host/big.ferry"
  umount "$scratch/small-host"
}

# As mount(8) and fstab do it; after umount(8), which does not wait for the daemon, fsck and the
# next mount do. The helper's name is put in place for this check alone, in its own mount namespace.
mount_helper() {
  mkdir -p "$scratch/overlay/upper" "$scratch/overlay/work" "$scratch/mnt"
  timeout 60 "$ferry" mkfs "$scratch/helper.ferry" --size 1G
  export scratch ferry
  # shellcheck disable=SC2016
  unshare --mount --propagation private bash -euc '
    mount -t tmpfs none "$scratch/overlay"
    mkdir "$scratch/overlay/upper" "$scratch/overlay/work"
    mount -t overlay none -o "lowerdir=/usr/sbin,upperdir=$scratch/overlay/upper,workdir=$scratch/overlay/work" /usr/sbin
    ln -sf "$ferry" /usr/sbin/mount.fuse.ferry
    mount -t fuse.ferry "$scratch/helper.ferry" "$scratch/mnt" -o noatime,nodev
    grep " $scratch/mnt fuse.ferry .*nodev" /proc/self/mounts
    echo through the helper >"$scratch/mnt/file"
    mount -o remount,ro "$scratch/mnt"
    if touch "$scratch/mnt/other" 2>/dev/null; then exit 1; fi
    umount "$scratch/mnt"
    "$ferry" fsck "$scratch/helper.ferry"
    echo "$scratch/helper.ferry $scratch/mnt fuse.ferry defaults,nofail,x-systemd.automount,cache=strict 0 0" >"$scratch/fstab"
    mount --fstab "$scratch/fstab" "$scratch/mnt"
    grep "through the helper" "$scratch/mnt/file"
    umount "$scratch/mnt"
    if mount -t fuse.ferry "$scratch/helper.ferry" "$scratch/mnt" -o nonsense; then exit 1; fi'
}

# Somebody who is not root mounts his own volume through fusermount3. Where /dev/fuse is not open to
# everybody, as udev makes it, one that is takes its place for this check alone.
user_mounts_his_own() {
  local home=$scratch/user
  install -d -o daemon -g daemon "$home" "$home/mnt"
  cp "$ferry" "$home/ferry"
  export home
  # shellcheck disable=SC2016
  unshare --mount --propagation private bash -euc '
    mkdir "$home/dev"
    mount -t tmpfs -o mode=755 none "$home/dev"
    mknod -m 666 "$home/dev/fuse" c 10 229
    mount --bind "$home/dev/fuse" /dev/fuse
    as_user() { setpriv --reuid daemon --regid daemon --clear-groups -- "$@"; }
    as_user "$home/ferry" mkfs "$home/own.ferry" --size 1G
    as_user "$home/ferry" mount "$home/own.ferry" "$home/mnt"
    as_user sh -c "echo mine >$home/mnt/file && cat $home/mnt/file && stat -c %U $home/mnt/file"
    if cat "$home/mnt/file" 2>/dev/null; then echo "root may look into it, which only allow_other gives"; exit 1; fi
    as_user "$home/ferry" stats "$home/mnt" >/dev/null
    as_user "$home/ferry" sync "$home/mnt"
    as_user "$home/ferry" umount "$home/mnt"
    as_user "$home/ferry" fsck "$home/own.ferry"'
}

# A foreign file is neither mounted nor overwritten.
foreign_file_is_refused() {
  echo 'somebody else wrote this' >"$scratch/foreign"
  truncate -s 100M "$scratch/foreign"
  if "$ferry" mkfs "$scratch/foreign"; then return 1; fi
  mkdir -p "$scratch/mnt"
  if "$ferry" mount "$scratch/foreign" "$scratch/mnt"; then return 1; fi
  [ "$(head -n 1 "$scratch/foreign")" = 'somebody else wrote this' ]
  local code=0; "$ferry" fsck "$scratch/foreign" || code=$?; [ "$code" = 8 ]
  "$ferry" mkfs "$scratch/foreign" --force
  if "$ferry" mkfs "$scratch/foreign"; then return 1; fi
  "$ferry" fsck "$scratch/foreign"
}

# Two programs read a file over and over that does not fit into the memory of their control group.
readers_wait_for_memory() {
  local group=$1
  head -c 300M /dev/zero >"$scratch/does-not-fit"
  sync "$scratch/does-not-fit"
  # Pages that are cached already would not count as the group's.
  dd if="$scratch/does-not-fit" iflag=nocache count=0 status=none
  for _ in 1 2; do
    timeout 120 sh -c 'echo $$ >"$1/cgroup.procs" && while :; do cat "$2"; done' - "$group" "$scratch/does-not-fit" >/dev/null &
    readers+=($!)
  done
}

# limit_is TEST BYTES: whether the memory that the daemon uses at most gets there, within 60 s.
limit_is() {
  local _
  for _ in $(seq 300); do
    [ ! "$(stat_of "$scratch/mnt" memory limit_bytes)" "$1" "$2" ] || return 0
    sleep 0.2
  done
  stat_of "$scratch/mnt" memory
  return 1
}

# Programs wait for memory: the daemon gives of its own, and takes it back afterwards.
gives_memory_up() {
  local group readers=() before
  group=$(mktemp -d /sys/fs/cgroup/memory/ferry-test.XXXXXX)
  echo 32M >"$group/memory.limit_in_bytes"
  mount_volume "$scratch/pressure.ferry" "$scratch/mnt" cache_size=512M
  head -c 500M /dev/urandom >"$scratch/mnt/file"
  md5sum "$scratch/mnt/file" >"$scratch/pressure.md5"
  "$ferry" sync "$scratch/mnt"
  before=$(stat_of "$scratch/mnt" memory used_bytes)
  [ "$before" -gt $((400 << 20)) ]
  readers_wait_for_memory "$group"
  limit_is -lt $((256 << 20))
  kill "${readers[@]}"
  wait "${readers[@]}" || true
  [ "$(stat_of "$scratch/mnt" memory used_bytes)" -lt $((300 << 20)) ]
  md5sum --quiet -c "$scratch/pressure.md5"
  limit_is -gt $((300 << 20))
  unmount_volume "$scratch/mnt"
  rm "$scratch/does-not-fit" "$scratch/pressure.ferry"
  rmdir "$group"
}

# A container may have no /sys. Requests then come by /dev/fuse.
mount_without_sys() {
  # shellcheck disable=SC2016
  unshare --mount sh -euc '
    umount -l /sys
    "$1" mount --create "$2/sys.ferry" "$2/mnt"
    echo here >"$2/mnt/file"
    "$1" umount "$2/mnt"
    "$1" mount "$2/sys.ferry" "$2/mnt"
    grep -x here "$2/mnt/file"
    "$1" umount "$2/mnt"' mount "$ferry" "$scratch"
}

# volume_has VOLUME DIRECTORY: each file of a directory, and nothing else, is in a volume or snapshot.
volume_has() {
  timeout 60 "$ferry" mount "$1" "$scratch/snap"
  diff -r --no-dereference "$2" "$scratch/snap"
  unmount_volume "$scratch/snap"
  timeout 60 "$ferry" fsck "$1"
}

# A volume in a file on XFS is changed after a snapshot. Clones and a rollback bring back each of its
# states, whatever is written in another one.
file_snapshots() {
  local volume=$scratch/shared/vol clone user=$scratch/shared/user
  truncate -s 2G "$scratch/shared.img"
  mkfs.xfs -q -m reflink=1 "$scratch/shared.img"
  mkdir -p "$scratch"/{shared,snap,one,two}
  mount -o loop "$scratch/shared.img" "$scratch/shared"
  timeout 60 "$ferry" mkfs "$volume" --size 512M
  mount_volume "$volume" "$scratch/mnt"
  cp -a "$repo/docs" "$repo/crates/ferry-fs" "$repo/Cargo.lock" "$scratch/mnt"
  cp -a "$scratch/mnt/." "$scratch/one"
  timeout 60 "$ferry" snapshot create "$scratch/mnt" one
  mv "$scratch/mnt/docs" "$scratch/mnt/moved"
  rm -r "$scratch/mnt/ferry-fs/tests"
  tac "$repo/Cargo.lock" >"$scratch/mnt/Cargo.lock"
  cp -a "$scratch/mnt/." "$scratch/two"
  timeout 60 "$ferry" clone "$scratch/mnt" "$scratch/shared/now"
  timeout 60 "$ferry" clone "$volume@one" "$scratch/shared/then"
  volume_has "$scratch/shared/now" "$scratch/two"
  volume_has "$scratch/shared/then" "$scratch/one"
  for clone in now then; do
    timeout 60 "$ferry" mount "$scratch/shared/$clone" "$scratch/snap"
    rm -r "$scratch"/snap/*
    dd if=/dev/urandom of="$scratch/snap/new" bs=1M count=40 conv=fsync status=none
    unmount_volume "$scratch/snap"
    timeout 60 "$ferry" fsck "$scratch/shared/$clone"
  done
  diff -r --no-dereference "$scratch/two" "$scratch/mnt"
  if timeout 60 "$ferry" rollback "$volume@one"; then return 1; fi
  unmount_volume "$scratch/mnt"
  timeout 60 "$ferry" rollback "$volume@one"
  rm "$scratch"/shared/{now,then}
  volume_has "$volume" "$scratch/one"
  volume_has "$volume@one" "$scratch/one"
  volume_has "$volume@before-rollback" "$scratch/two"
  # A user does the same with his own volume.
  install -d -o daemon -g daemon "$user"
  cp "$ferry" "$scratch/shared/ferry"
  as_daemon() { timeout 60 setpriv --reuid daemon --regid daemon --clear-groups "$scratch/shared/ferry" "$@"; }
  as_daemon mkfs "$user/vol" --size 64M
  as_daemon snapshot create "$user/vol" one
  as_daemon clone "$user/vol@one" "$user/clone"
  as_daemon rollback "$user/vol@one"
  as_daemon fsck "$user/vol@before-rollback"
  as_daemon fsck "$user/clone"
  umount "$scratch/shared"
  rm -r "$scratch"/{shared.img,one,two}
}

suite_space() {
  say "--- room and ways to mount"
  check "a full volume: ENOSPC at the write, removal works" 200 full_volume
  check "a full volume with cache=writeback: endless writes end" 200 full_behind_writeback
  check "a full disk below a sparse volume" 200 full_host
  check "mount(8) and fstab through the helper" 60 mount_helper
  check "a mount where there is no /sys" 60 mount_without_sys
  check "a user mounts his own volume" 60 user_mounts_his_own
  check "a volume in a file is cloned and rolled back" 60 file_snapshots
  if [ -f /sys/fs/cgroup/memory/memory.limit_in_bytes ] && [ -r /proc/pressure/memory ]; then
    check "memory is given up while programs wait for it" 200 gives_memory_up
  else
    say "skip  memory is given up: no control groups (version 1) or no /proc/pressure here"
  fi
  check "a foreign file is refused" 60 foreign_file_is_refused
}
