# The daemon dies in the middle of work; sourced by scripts/test.
# shellcheck shell=bash

# Beside the command under test.
ack=${ferry%/*}/ack

# Files with contents that say what they are; what was fsynced is written down outside the mount.
# Then the mount is killed, mounted again, and compared.
kill_and_verify() {
  local log=$scratch/ack.$1.log
  mount_volume "$scratch/crash.ferry" "$scratch/mnt"
  mkdir -p "$scratch/mnt/ack$1"
  "$ack" run "$scratch/mnt/ack$1" "$log" &
  local writer=$!
  sleep "$2"
  kill_mount "$scratch/crash.ferry"
  wait "$writer" || true
  [ -s "$log" ] || { say "nothing was acknowledged before the kill"; return 1; }
  say "acknowledged: $(wc -l <"$log") lines"
  mount_volume "$scratch/crash.ferry" "$scratch/mnt"
  "$ack" verify "$scratch/mnt/ack$1" "$log"
  unmount_volume "$scratch/mnt"
  timeout 100 "$ferry" fsck "$scratch/crash.ferry"
}

# Killed while it recovers, and while it unmounts, it is none the worse.
kill_while_stopping() {
  mount_volume "$scratch/crash.ferry" "$scratch/mnt"
  cp -r "$repo/crates" "$scratch/mnt/tree"
  "$ferry" sync "$scratch/mnt"
  cp -r "$repo/crates" "$scratch/mnt/tree2"
  local daemon holder; daemon=$(daemon_of "$scratch/crash.ferry")
  holder=$(holder_of "$daemon")
  "$ferry" umount "$scratch/mnt" &
  local unmounting=$!
  kill -9 "$holder" "$daemon" || true
  wait "$unmounting" || true
  mount_volume "$scratch/crash.ferry" "$scratch/mnt"
  diff -r "$repo/crates" "$scratch/mnt/tree"
  rm -rf "$scratch/mnt/tree" "$scratch/mnt/tree2"
  unmount_volume "$scratch/mnt"
  timeout 100 "$ferry" fsck "$scratch/crash.ferry"
}

# SIGTERM is a clean unmount, also from a busy mount: what was written is there although nobody
# synced.
terminate_cleanly() {
  mount_volume "$scratch/term.ferry" "$scratch/mnt"
  echo kept >"$scratch/mnt/file"
  local daemon; daemon=$(daemon_of "$scratch/term.ferry")
  # The mount has ended, and the directory in which somebody works is still there.
  (cd "$scratch/mnt" && kill -TERM "$daemon" && until ! mountpoint -q "$scratch/mnt"; do sleep 0.02; done && cat file)
  wait_until_free "$scratch/term.ferry"
  mount_volume "$scratch/term.ferry" "$scratch/mnt"
  [ "$(cat "$scratch/mnt/file")" = kept ]
  unmount_volume "$scratch/mnt"
  "$ferry" fsck "$scratch/term.ferry" | grep -v 'not unmounted cleanly'
}

wait_until_free() {
  local attempt
  for attempt in $(seq 100); do daemon_of "$1" >/dev/null || return 0; sleep 0.1; done
  say "still held after $attempt looks"; return 1
}

# A second mount of the volume is refused and names the process that holds it.
second_mount_is_refused() {
  mount_volume "$scratch/second.ferry" "$scratch/mnt"
  mkdir -p "$scratch/mnt2"
  local said
  if said=$("$ferry" mount "$scratch/second.ferry" "$scratch/mnt2" 2>&1); then return 1; fi
  say "$said"
  grep -q "$(daemon_of "$scratch/second.ferry")" <<<"$said"
  local code=0
  "$ferry" fsck "$scratch/second.ferry" || code=$?
  [ "$code" = 8 ]
  unmount_volume "$scratch/mnt"
}

# A daemon that answers nothing (it is stopped) blocks nothing for good: its mount ends, and a
# program that waited for an answer gets an error.
force_ends_a_hung_mount() {
  mount_volume "$scratch/hung.ferry" "$scratch/mnt"
  local daemon; daemon=$(daemon_of "$scratch/hung.ferry")
  kill -STOP "$daemon"
  (ls -l "$scratch/mnt/nothing" || true) &
  local asking=$!
  timeout 60 "$ferry" umount --force --timeout 1s "$scratch/mnt"
  if mountpoint -q "$scratch/mnt"; then return 1; fi
  wait "$asking"
  mount_volume "$scratch/hung.ferry" "$scratch/mnt"
  unmount_volume "$scratch/mnt"
}

suite_crash() {
  say "--- the daemon dies"
  local round
  for round in 1 2 3; do check "kill -9 while files are synced, round $round" 150 kill_and_verify "$round" "$round"; done
  check "kill -9 while it unmounts" 150 kill_while_stopping
  check "SIGTERM unmounts cleanly, a busy mount too" 60 terminate_cleanly
  check "a second mount is refused, with the holder's pid" 60 second_mount_is_refused
  check "umount --force ends a hung mount" 60 force_ends_a_hung_mount
}
