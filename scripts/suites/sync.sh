# Fsyncs on a device that stalls, fails or is full; sourced by scripts/test.
# shellcheck shell=bash

# The null file system, and the program that has many fsyncs pending.
examples=${ferry%/*}/examples

# A volume at $scratch/null/volume, mounted at $scratch/mnt, whose writes and flushes are not
# answered while $scratch/null/stall is there.
stalling_volume() {
  mkdir -p "$scratch/null" "$scratch/mnt"
  "$examples/null" "$scratch/null" strict stalls 2>>"$scratch/null.log" &
  null_pid=$!
  until mountpoint -q "$scratch/null"; do sleep 0.1; done
  "$ferry" mkfs "$scratch/null/volume" --size 1G
  mount_volume "$scratch/null/volume" "$scratch/mnt" commit_interval=1h
}

# holds PROGRAM JSON: what a line of JSON must say, in Python.
holds() { python3 -c 'import json, sys; sys.exit(0 if eval(sys.argv[1], {"said": json.loads(sys.argv[2])}) else "not so: " + sys.argv[1])' "$1" "$2"; }

# stalled_fsyncs FILES SECONDS: the device stalls, all fsyncs wait, everything else goes on (or the
# program does not end), and all are answered by the commit under way and the ones that were on
# board of the next.
stalled_fsyncs() {
  local said contexts
  stalling_volume
  contexts=$(stat_of "$scratch/mnt" log contexts)
  said=$("$examples/pending" "$scratch/mnt" "$1" "$2" "touch $scratch/null/stall" "rm $scratch/null/stall" "$(daemon_of "$scratch/null/volume")")
  contexts=$(($(stat_of "$scratch/mnt" log contexts) - contexts))
  say "$said"
  say "$contexts contexts"
  holds "said['pending'] == $1 and said['answers_by_errno'] == {'0': $1}" "$said"
  holds "said['others']['rounds'] > 0" "$said"
  # 24 KiB for each: its data on the way to the device (8), a page of the buffer that its request is
  # in, entries; and what else was made.
  holds "said['memory_kib']['stalled'] - said['memory_kib']['before'] < 32768 + 24 * $1" "$said"
  [ "$contexts" -le 3 ]
  unmount_volume "$scratch/mnt"
  timeout 60 "$ferry" fsck "$scratch/null/volume"
  umount "$scratch/null"
  wait "$null_pid"
}

# The same, and then the device is gone: every fsync hears of it, and so does every later one.
lost_device() {
  local said
  stalling_volume
  said=$("$examples/pending" "$scratch/mnt" "$1" "$2" "touch $scratch/null/stall" "kill -9 $null_pid")
  say "$said"
  holds "said['pending'] == $1 and said['answers_by_errno'] == {'5': $1}" "$said"
  python3 - "$scratch/mnt" <<'PY'
import errno, os, sys
file = os.path.join(sys.argv[1], "pending 0")
assert open(file, "rb").read() == bytes(4096), "what is in memory can be read"
for number in (errno.EROFS, errno.EIO):
    try:
        if number == errno.EROFS:
            os.open(os.path.join(sys.argv[1], "new"), os.O_CREAT | os.O_WRONLY)
        else:
            os.fsync(os.open(file, os.O_RDONLY))
    except OSError as error:
        assert error.errno == number, error
    else:
        sys.exit(f"no {errno.errorcode[number]}")
PY
  local status=0
  said=$(timeout 60 "$ferry" umount "$scratch/mnt" 2>&1) || status=$?
  umount -l "$scratch/null"
  say "$said"
  mountpoint -q "$scratch/mnt" && return 1
  [ "$status" = 1 ] && [[ $said == *"the volume was not closed cleanly"*"I/O error"* ]]
}

# requests_of_null OPERATION: so many of them the null file system has been asked for.
requests_of_null() { "$ferry" stats "$scratch/null" --json | python3 -c '
import json, sys
print(json.load(sys.stdin)["fuse"]["operations"].get(sys.argv[1], {"count": 0})["count"])' "$1"; }

# flushes_of COMMAND…: the volume is written and fsynced as often as it runs, at least.
flushes_of() {
  local n writes fsyncs
  writes=$(requests_of_null write); fsyncs=$(requests_of_null fsync)
  for n in $(seq 20); do "$@" "$n"; done
  writes=$(($(requests_of_null write) - writes)); fsyncs=$(($(requests_of_null fsync) - fsyncs))
  say "20 times $*: $writes writes, $fsyncs fsyncs"
  [ "$writes" -ge 20 ] && [ "$fsyncs" -ge 20 ]
}

fsynced() { dd if=/dev/urandom of="$scratch/mnt/fsynced $1" bs=5k count=1 conv=fsync status=none; }
datasynced() { dd if=/dev/urandom of="$scratch/mnt/datasynced $1" bs=5k count=1 oflag=dsync status=none; }
made() { mkdir "$scratch/mnt/made $1"; sync "$scratch/mnt"; }

# Before a durable answer the host has flushed. A killed daemon would not show the difference.
durable_is_flushed() {
  local way
  stalling_volume
  for way in fsynced datasynced made; do flushes_of "$way"; done
  unmount_volume "$scratch/mnt"
  umount "$scratch/null"
  wait "$null_pid"
}

# Stores to mapped memory of a file with a hole find no space when the kernel writes them back:
# every descriptor hears of it once.
no_space_in_write_back() {
  mkdir -p "$scratch/mnt"
  "$ferry" mkfs "$scratch/full.ferry" --size 64M
  mount_volume "$scratch/full.ferry" "$scratch/mnt"
  python3 - "$scratch/mnt" <<'PY'
import errno, mmap, os, sys, time
hole, filler = (os.path.join(sys.argv[1], name) for name in ("hole", "filler"))
def fsync(fd):
    try:
        os.fsync(fd)
    except OSError as error:
        return errno.errorcode[error.errno]
size = 1 << 20
first = os.open(hole, os.O_RDWR | os.O_CREAT)
os.ftruncate(first, size)
second, third = (os.open(hole, os.O_RDWR) for _ in range(2))
memory = mmap.mmap(first, size)
full = os.open(filler, os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(full, bytes(4096))
except OSError as error:
    assert error.errno == errno.ENOSPC, error
memory[:] = b"a" * size
told = [fsync(fd) for fd in (first, second, first, second)]
assert told == ["ENOSPC", "ENOSPC", None, None], told
os.unlink(filler)
os.close(full)
# A large file's space comes back in the background.
end = time.monotonic() + 30
while os.statvfs(sys.argv[1]).f_bavail * 4096 < 16 * size and time.monotonic() < end:
    time.sleep(0.05)
memory[:] = b"b" * size
told = [fsync(fd) for fd in (third, first, third)]
assert told == ["ENOSPC", None, None], told
assert os.pread(second, size, 0) == b"b" * size
PY
  unmount_volume "$scratch/mnt"
  timeout 60 "$ferry" fsck "$scratch/full.ferry"
}

# The flush policy in the list of mounts: as mounted, as tuned, carried through a remount, and gone
# with the mount.
shown_by_mount() {
  local shown
  mkdir -p "$scratch/shown mnt"
  "$ferry" mkfs "$scratch/shown.ferry" --size 64M
  mount_volume "$scratch/shown.ferry" "$scratch/shown mnt" cache=strict,flush=gather
  shown=$(mount | grep -F "$scratch/shown mnt type fuse.ferry")
  [[ $shown == *,cache=strict,flush=gather,fast_flush=2ms\) ]]
  "$ferry" tune "$scratch/shown mnt" --flush each --fast-flush 500us
  shown=$(mount | grep -F "$scratch/shown mnt type fuse.ferry")
  [[ $shown == *,cache=strict,flush=each,fast_flush=500us\) ]]
  "$ferry" mount "$scratch/shown.ferry" "$scratch/shown mnt" -o remount,ro,cache=strict,flush=each
  ! "$ferry" mount "$scratch/shown.ferry" "$scratch/shown mnt" -o remount,rw,flush=gather || return 1
  unmount_volume "$scratch/shown mnt"
  ! grep -F "$scratch/shown" /run/mount/utab
}

# suite_sync FILES: so many fsyncs pending.
# unmodified_fsyncs FILES: that many fsyncs in flight, by io_uring, libaio and threads. Each is
# answered by few commits, and what was answered survives the daemon's death.
unmodified_fsyncs() {
  local how contexts daemon
  for how in uring libaio threads; do
    mount_volume "$scratch/unmodified.ferry" "$scratch/mnt" commit_interval=1h
    mkdir "$scratch/mnt/$how"
    daemon=$(daemon_of "$scratch/unmodified.ferry")
    contexts=$(stat_of "$scratch/mnt" log contexts)
    python3 "$repo/scripts/suites/in_flight.py" "$scratch/mnt/$how" "$how" "$1" "$daemon"
    contexts=$(($(stat_of "$scratch/mnt" log contexts) - contexts))
    say "$contexts contexts"
    [ "$contexts" -lt $(($1 / 2)) ] || die "$how: $contexts commits for $1 files"
    kill_mount "$scratch/unmodified.ferry"
    umount --lazy "$scratch/mnt"
    mount_volume "$scratch/unmodified.ferry" "$scratch/mnt" commit_interval=1h
    python3 - "$scratch/mnt/$how" "$1" <<'PY'
import sys
for n in range(int(sys.argv[2])):
    assert open(f"{sys.argv[1]}/{n}", "rb").read() == n.to_bytes(4, "little") * 1024, n
PY
    unmount_volume "$scratch/mnt"
  done
  timeout 60 "$ferry" fsck "$scratch/unmodified.ferry"
}

# synced_out_of_the_kernel MODE WAY: `ferry sync` covers what the kernel has not handed over, also
# while the daemon is slow.
synced_out_of_the_kernel() {
  local volume=$scratch/kernel-pages.ferry
  [ -e "$volume" ] || "$ferry" mkfs "$volume" --size 1G
  mount_volume "$volume" "$scratch/mnt" "cache=$1,commit_interval=1h"
  timeout 60 python3 "$repo/scripts/suites/kernel_pages.py" write "$scratch/mnt" "$(daemon_of "$volume")" "$2"
  umount --lazy "$scratch/mnt"
  mount_volume "$volume" "$scratch/mnt"
  python3 "$repo/scripts/suites/kernel_pages.py" check "$scratch/mnt"
  rm "$scratch/mnt"/*
  unmount_volume "$scratch/mnt"
}

suite_sync() {
  say "--- fsyncs on a device that stalls, fails or is full"
  check "what is durable has been flushed below" 120 durable_is_flushed
  check "2000 fsyncs of io_uring, libaio and threads in flight" 180 unmodified_fsyncs 2000
  check "ferry sync covers stores to mapped memory, below a slow daemon" 90 synced_out_of_the_kernel kernel map
  check "ferry sync covers cache=writeback, below a slow daemon" 90 synced_out_of_the_kernel writeback write
  check "$1 fsyncs wait for a device that stalls" 180 stalled_fsyncs "$1" 2
  check "$1 fsyncs wait, and the device is gone" 180 lost_device "$1" 1
  check "write-back without space is told to each descriptor once" 60 no_space_in_write_back
  check "mount shows the flush policy" 30 shown_by_mount
}
