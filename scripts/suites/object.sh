# Volumes in an object store; sourced by scripts/test. Each function takes the volume's URL.
# shellcheck shell=bash

# object_killed URL: what was synced is there after kill -9 of the daemon, and the volume is clean.
object_killed() {
  mount_volume "$1" "$scratch/mnt"
  cp -r "$repo/crates" "$scratch/mnt/tree"
  "$ferry" sync "$scratch/mnt"
  kill_mount_of "$(stat_of "$scratch/mnt" fuse daemon)"
  mount_volume "$1" "$scratch/mnt"
  diff -r "$repo/crates" "$scratch/mnt/tree"
  object_clean "$1"
}

# object_taken_over URL: a second mount takes the volume; the first one stops for ever.
object_taken_over() {
  mount_volume "$1" "$scratch/mnt"
  cp -r "$repo/docs" "$scratch/mnt/docs"
  "$ferry" sync "$scratch/mnt"
  mkdir -p "$scratch/second"
  "$ferry" mount "$1" "$scratch/second" && return 1
  timeout 120 "$ferry" mount "$1" "$scratch/second" --take-over
  diff -r "$repo/docs" "$scratch/second/docs"
  # The first owner acknowledges nothing any more.
  { echo lost >"$scratch/mnt/lost" && "$ferry" sync "$scratch/mnt"; } && return 1
  echo late >"$scratch/second/late"
  "$ferry" umount "$scratch/second"
  "$ferry" umount --force "$scratch/mnt" || true
  mount_volume "$1" "$scratch/mnt"
  [ "$(cat "$scratch/mnt/late")" = late ]
  object_clean "$1"
}

# object_warm URL: what was warmed is read from the cache on disk, after the next mount, too.
object_warm() {
  local cache=cache=$scratch/cache,cache_disk=256M before
  rm -rf "$scratch/cache"
  mount_volume "$1" "$scratch/mnt"
  head -c 64M /dev/urandom >"$scratch/large"
  cp -r "$repo/crates" "$scratch/large" "$scratch/mnt"
  unmount_volume "$scratch/mnt"
  mount_volume "$1" "$scratch/mnt" "$cache"
  "$ferry" warm "$scratch/mnt/crates" "$scratch/mnt/large"
  unmount_volume "$scratch/mnt"
  mount_volume "$1" "$scratch/mnt" "$cache"
  before=$(stat_of "$scratch/mnt" store get_bytes)
  diff -r "$repo/crates" "$scratch/mnt/crates"
  cmp "$scratch/large" "$scratch/mnt/large"
  # Of 66 MiB; the tables of the file system may be asked for.
  [ $(($(stat_of "$scratch/mnt" store get_bytes) - before)) -lt $((1 << 20)) ]
  rm -r "$scratch/mnt/crates" "$scratch/mnt/large" "$scratch/large"
  unmount_volume "$scratch/mnt"
}

# object_fsx URL OPERATIONS SEED
object_fsx() {
  mount_volume "$1" "$scratch/mnt" cache_size=64M
  mkdir -p "$scratch/artifacts-object"
  "$tools/bin/fsx" -f "$repo/scripts/suites/fsx.toml" -N "$2" -S "$3" -P "$scratch/artifacts-object" "$scratch/mnt/fsx"
  object_clean "$1"
}

# Appends numbers to a file, syncs after each, and then notes it as acknowledged. It ends at the first
# error. fsync_writer FILE ACKNOWLEDGED
fsync_writer() {
  exec python3 - "$1" "$2" <<'PYTHON'
import os, sys
file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
with open(sys.argv[2], "w", buffering=1) as acknowledged:
    n = 0
    try:
        while True:
            n += 1
            os.write(file, b"%d\n" % n)
            os.fsync(file)
            print(n, file=acknowledged)
    except OSError as error:
        print(error, file=sys.stderr)
PYTHON
}
acknowledged() { wc -l <"$scratch/acknowledged"; }

# object_stopped URL COUNT: an owner is stopped (SIGSTOP), another one takes the volume, the first one
# goes on: it acknowledges nothing that the second one does not have. COUNT times in turn.
object_stopped() {
  local mount=$scratch/mnt next=$scratch/second round owner writer other
  mkdir -p "$next"
  mount_volume "$1" "$mount"
  for round in $(seq "$2"); do
    : >"$scratch/acknowledged"
    fsync_writer "$mount/stopped" "$scratch/acknowledged" &
    writer=$!
    until [ "$(acknowledged)" -ge 20 ]; do kill -0 "$writer"; sleep 0.05; done
    owner=$(stat_of "$mount" fuse daemon)
    kill -STOP "$owner"
    timeout 120 "$ferry" mount "$1" "$next" --take-over
    kill -CONT "$owner"
    # Its writer ends with an error.
    wait "$writer"
    say "round $round: $(acknowledged) acknowledged, $(wc -l <"$next/stopped") there"
    head -n "$(acknowledged)" "$next/stopped" | cmp - "$scratch/acknowledged"
    rm "$next/stopped"
    "$ferry" umount --force "$mount" || true
    other=$mount mount=$next next=$other
  done
  unmount_volume "$mount"
  timeout 200 "$ferry" fsck "$1"
}

# object_snapshots URL: snapshots are made while files are written and synced. Each is what was there at
# that time, after the volume was overwritten and its owner was killed, too.
object_snapshots() {
  local mount=$scratch/mnt second=$scratch/second writer before name there
  mkdir -p "$second" "$scratch/third"
  mount_volume "$1" "$mount"
  cp -r "$repo/docs" "$mount/documents"
  : >"$scratch/acknowledged"
  fsync_writer "$mount/appended" "$scratch/acknowledged" &
  writer=$!
  until [ "$(acknowledged)" -ge 20 ]; do kill -0 "$writer"; sleep 0.05; done
  before=$(acknowledged)
  "$ferry" snapshot create "$mount" busy
  rm -r "$mount/documents"
  cp -r "$repo/scripts" "$mount/documents"
  "$ferry" sync "$mount"
  "$ferry" mount "$1@busy" "$second"
  diff -r "$repo/docs" "$second/documents"
  diff -r "$repo/scripts" "$mount/documents"
  there=$(wc -l <"$second/appended")
  say "$before acknowledged before, $there in the snapshot"
  [ "$there" -ge "$before" ]
  seq "$there" | cmp - "$second/appended"
  # The same below the mount that is written to.
  diff -r "$repo/docs" "$mount/.snapshots/busy/documents"
  cp -a "$mount/.snapshots/busy/documents" "$scratch/restored"
  diff -r "$repo/docs" "$scratch/restored"
  cmp "$second/appended" "$mount/.snapshots/busy/appended"
  [ "$(find "$second" | wc -l)" = "$(find "$mount/.snapshots/busy" | wc -l)" ]
  { echo no >"$mount/.snapshots/busy/no"; } 2>"$scratch/refused" && return 1
  rm -r "$scratch/restored"
  { echo no >"$second/no"; } 2>"$scratch/refused" && return 1
  "$ferry" umount "$second"
  "$ferry" fsck "$1@busy"
  object_snapshots_diff "$1"
  object_snapshots_killed "$1"
  # Its writer has ended: the mount was killed.
  wait "$writer"
  "$ferry" mount "$1" "$second" -o snapshot=busy
  diff -r "$repo/docs" "$second/documents"
  [ "$(wc -l <"$second/appended")" = "$there" ]
  "$ferry" umount "$second"
  for name in $("$ferry" snapshot list "$1" --json | sed -n 's/.*"name": "\(.*\)".*/\1/p'); do
    "$ferry" snapshot delete "$1" "$name"
  done
  [ -z "$("$ferry" snapshot list "$1")" ]
  "$ferry" mount "$1@busy" "$second" && return 1
  rm -r "$mount/documents" "$mount/appended"
  object_clean "$1"
}

# object_mounted URL FUNCTION: with the volume mounted at $scratch/mnt.
object_mounted() {
  mkdir -p "$scratch/second" "$scratch/third"
  mount_volume "$1" "$scratch/mnt"
  "$2" "$1"
  object_clean "$1"
}

# object_cloned URL: the volume, mounted at $scratch/mnt, is cloned and overwritten, its snapshot deleted
# and its owner killed: the clone, mounted beside it, has what it had. So has a clone of it whose making
# was killed, if it is there.
object_cloned() {
  local mount=$scratch/mnt second=$scratch/second clone=$1-clone pin after
  mkdir "$mount/cloned"
  cp -r "$repo/docs" "$mount/cloned/then"
  "$ferry" snapshot create "$mount" cloned
  rm -r "$mount/cloned/then"
  cp -r "$repo/scripts" "$mount/cloned/now"
  "$ferry" clone "$1@cloned" "$clone"
  "$ferry" mount "$clone" "$second"
  "$ferry" snapshot delete "$mount" cloned
  pin=$("$ferry" snapshot list "$1" --json | sed -n 's/.*"name": "\(.*\)".*/\1/p')
  "$ferry" snapshot delete "$mount" "$pin" && return 1
  diff -r "$repo/docs" "$second/cloned/then"
  cp -r "$repo/docs" "$second/cloned/more"
  "$ferry" snapshot create "$second" more
  kill_mount_of "$(stat_of "$mount" fuse daemon)"
  mount_volume "$1" "$mount"
  diff -r "$repo/scripts" "$mount/cloned/now"
  [ "$(ls "$mount/cloned")" = now ]
  for after in 0.01 0.03 0.06; do
    timeout -s KILL "$after" "$ferry" clone "$clone@more" "$clone-$after" || true
    if "$ferry" mount "$clone-$after" "$scratch/third"; then
      say "killed after $after s: it is there"
      diff -r "$repo/docs" "$scratch/third/cloned/more"
      "$ferry" umount "$scratch/third"
    fi
  done
  "$ferry" umount "$second"
  timeout 200 "$ferry" fsck "$clone"
  rm -r "$mount/cloned"
  # A bucket keeps the clone, and the volume its pin.
  if [ "${1%%://*}" = dir ]; then
    rm -r "${clone#dir://}"
    "$ferry" snapshot delete "$mount" "$pin"
    [ -z "$("$ferry" snapshot list "$mount")" ]
  fi
}

# object_rolled_back URL: the volume, mounted at $scratch/mnt, goes back to a snapshot and forth again,
# and the command is killed. It is one of the two as a whole.
object_rolled_back() {
  local mount=$scratch/mnt after there
  mkdir "$mount/rolled-back"
  cp -r "$repo/docs" "$mount/rolled-back/then"
  "$ferry" snapshot create "$mount" then
  rm -r "$mount/rolled-back/then"
  cp -r "$repo/scripts" "$mount/rolled-back/now"
  unmount_volume "$mount"
  "$ferry" rollback "$1@then"
  timeout 200 "$ferry" fsck "$1"
  mount_volume "$1" "$mount"
  diff -r "$repo/docs" "$mount/rolled-back/then"
  [ ! -e "$mount/rolled-back/now" ]
  unmount_volume "$mount"
  "$ferry" rollback "$1@before-rollback" --discard
  for after in 0.01 0.02 0.04; do
    timeout -s KILL "$after" "$ferry" rollback "$1@then" --discard || true
    mount_volume "$1" "$mount"
    there=$(ls "$mount/rolled-back")
    say "killed after $after s: $there"
    case $there in
      now) diff -r "$repo/scripts" "$mount/rolled-back/now" ;;
      then) diff -r "$repo/docs" "$mount/rolled-back/then" ;;
      *) return 1 ;;
    esac
    unmount_volume "$mount"
    [ "$there" = now ] || "$ferry" rollback "$1@before-rollback" --discard
  done
  mount_volume "$1" "$mount"
  rm -r "$mount/rolled-back"
  "$ferry" snapshot delete "$mount" then
  "$ferry" snapshot delete "$mount" before-rollback
}

# object_backed_up URL: the volume, mounted at $scratch/mnt, is backed up to another store, twice, and the
# command is killed. Each backup is what the snapshot was, and is restored.
object_backed_up() {
  local mount=$scratch/mnt second=$scratch/second to=${1%%\?*}-backup again=${1%%\?*}-restored after
  mkdir "$mount/backed-up"
  cp -r "$repo/docs" "$mount/backed-up/docs"
  "$ferry" snapshot create "$mount" night-1
  "$ferry" backup "$1@night-1" "$to"
  rm -r "$mount/backed-up/docs"
  cp -r "$repo/scripts" "$mount/backed-up/scripts"
  head -c 16M /dev/urandom >"$mount/backed-up/noise"
  "$ferry" snapshot create "$mount" night-2
  for after in 0.02 0.06 0.12; do
    timeout -s KILL "$after" "$ferry" backup "$1@night-2" "$to" || true
    say "killed after $after s: $("$ferry" snapshot list "$to" | wc -l) backups"
  done
  "$ferry" backup "$1@night-2" "$to"
  "$ferry" snapshot list "$to"
  timeout 200 "$ferry" fsck "$to"
  "$ferry" mount "$to@night-1" "$second"
  diff -r "$repo/docs" "$second/backed-up/docs"
  "$ferry" umount "$second"
  "$ferry" snapshot delete "$to" night-1
  "$ferry" backup "$mount" "$to"
  "$ferry" backup "$to@night-2" "$again"
  mount_volume "$again" "$second"
  diff -r "$repo/scripts" "$second/backed-up/scripts"
  cmp "$mount/backed-up/noise" "$second/backed-up/noise"
  echo more >"$second/more"
  unmount_volume "$second"
  timeout 200 "$ferry" fsck "$again"
  "$ferry" backup "$1@night-2" "$again" && return 1
  rm -r "$mount/backed-up"
}

# object_copied URL: a volume in a file is copied to a store, killed once, and from there to another file.
object_copied() {
  local mount=$scratch/second file=$scratch/copied.ferry again=$scratch/again.ferry to=${1%%\?*}-copy
  rm -f "$file" "$again"
  "$ferry" mkfs "$file" --size 1G
  mount_volume "$file" "$mount"
  cp -r "$repo/docs" "$mount/docs"
  head -c 64M /dev/urandom >"$mount/noise"
  unmount_volume "$mount"
  timeout -s KILL 0.4 "$ferry" copy "$file" "$to" || true
  # Unless it had ended.
  "$ferry" fsck "$to" || "$ferry" copy "$file" "$to"
  timeout 200 "$ferry" fsck "$to"
  "$ferry" copy "$to" "$again"
  mount_volume "$again" "$mount"
  diff -r "$repo/docs" "$mount/docs"
  unmount_volume "$mount"
  timeout 200 "$ferry" fsck "$again"
  rm "$file" "$again"
}

# object_snapshots_diff URL: what was removed, moved and changed since the snapshot is told by paths.
object_snapshots_diff() {
  local mount=$scratch/mnt before=$1@before after=$1@after
  mkdir "$mount/differs"
  cp -r "$repo/docs" "$mount/differs/old"
  "$ferry" snapshot create "$mount" before
  mv "$mount/differs/old" "$mount/differs/new"
  rm "$mount/differs/new/tour.md"
  echo more >>"$mount/differs/new/format.md"
  cp "$repo/docs/glossary.md" "$mount/differs/new/glossary.md"
  chmod 600 "$mount/differs/new/locking.md"
  echo made >"$mount/differs/made"
  "$ferry" snapshot create "$mount" after
  # The writer beside this changes a file, so they differ.
  "$ferry" diff "$before" "$after" >"$scratch/differs" && return 1
  printf '%s\n' "M /appended" "+ /differs/made" "M /differs/new/format.md" "A /differs/new/locking.md" \
    "R /differs/old -> /differs/new" "- /differs/old/tour.md" | cmp - "$scratch/differs"
  "$ferry" diff "$after" "$after"
  rm -r "$mount/differs"
}

# object_snapshots_killed URL: the daemon is killed while it makes a snapshot, which is there as a whole
# or not at all. FERRY_KILLS (4) times.
object_snapshots_killed() {
  local mount=$scratch/mnt second=$scratch/second round owner maker failed_to_make
  for round in $(seq "${FERRY_KILLS:-4}"); do
    head -c 8M /dev/urandom >"$mount/documents/noise"
    owner=$(stat_of "$mount" fuse daemon)
    "$ferry" snapshot create "$mount" "killed-$round" &
    maker=$! failed_to_make=
    # Sooner or later, while it works.
    sleep "0.$((RANDOM % 4))$((RANDOM % 10))"
    kill_mount_of "$owner"
    wait "$maker" || failed_to_make=1
    mount_volume "$1" "$mount"
    if "$ferry" snapshot list "$1" | grep -q "killed-$round\$"; then
      say "round $round: it is there"
      "$ferry" fsck "$1@killed-$round"
      "$ferry" mount "$1@killed-$round" "$second"
      diff -r --exclude=noise "$repo/scripts" "$second/documents"
      [ "$(stat -c %s "$second/documents/noise")" = $((8 << 20)) ]
      "$ferry" umount "$second"
    else
      [ "$failed_to_make" ]
    fi
  done
}

object_clean() {
  unmount_volume "$scratch/mnt"
  timeout 200 "$ferry" fsck "$1"
}

# object_owners URL: a new volume, and one owner after the other.
object_owners() {
  mkdir -p "$scratch/mnt" "$scratch/other"
  check "mkfs" 60 "$ferry" mkfs "$1"
  check "killed and mounted again" 120 object_killed "$1"
  check "taken over" 120 object_taken_over "$1"
  check "snapshots" 180 object_snapshots "$1"
  check "rolled back" 180 object_mounted "$1" object_rolled_back
  check "cloned" 180 object_mounted "$1" object_cloned
  check "backed up and restored" 180 object_mounted "$1" object_backed_up
  check "copied" 180 object_copied "$1"
  # FERRY_STOPS=200 FERRY_ONLY=stopped scripts/test object: as often as the bar says, 40 minutes.
  check "stopped and taken over, ${FERRY_STOPS:-3} times" $((60 + 30 * ${FERRY_STOPS:-3})) \
    object_stopped "$1" "${FERRY_STOPS:-3}"
}

# suite_object_on URL FSX-OPERATIONS
suite_object_on() {
  local seed=${FERRY_SEED:-$RANDOM}
  say "--- a volume in ${1%%://*}://, seed $seed"
  object_owners "$1"
  check "warmed and read again" 120 object_warm "$1"
  check "fsx, $2 operations" 300 object_fsx "$1" "$2" "$seed"
  mount_volume "$1" "$scratch/mnt"
  sed 's/^allow_remount = .*/allow_remount = false/' "$repo/scripts/suites/pjdfstest.toml" >"$scratch/no-remount.toml"
  pjdfstest_run -c "$scratch/no-remount.toml"
  check "git clone, fsck, gc" 300 program_git "$repo"
  check "sqlite3, killed and recovered" 300 program_sqlite 1000
  check "unmount and fsck" 200 object_clean "$1"
}

suite_object() { suite_object_on "dir://$scratch/store" "$1"; }
