# Damage below a volume: its effects, and the commands that report it; sourced by scripts/test.
# shellcheck shell=bash

# place_of VOLUME PATH BYTE: where on the unmounted volume that byte of the file is.
place_of() {
  "$ferry" debug "$1" path "$2" --json | python3 -c '
import json, sys
at = int(sys.argv[1])
for line in sys.stdin:
    one = json.loads(line)
    if one["type"] == "extent" and one["offset"] <= at < one["offset"] + one["length"]:
        print(one["device_offset"] + at - one["offset"])' "$3"
}

# spoil VOLUME BYTE: eight bytes there become others.
spoil() { printf 'spoiled!' | dd of="$1" bs=1 seek="$2" conv=notrunc status=none; }

# scrub_finds TARGET PATH OFFSET [OPTIONS]: that damage, and no other.
scrub_finds() {
  local target=$1 path=$2 offset=$3 code=0; shift 3
  timeout 120 "$ferry" scrub "$target" --json "$@" >"$scratch/scrub.json" || code=$?
  [ "$code" = 4 ] || { echo "exit code $code"; cat "$scratch/scrub.json"; return 1; }
  python3 - "$scratch/scrub.json" "$path" "$offset" <<'PYTHON'
import json, sys
report = json.load(open(sys.argv[1]))
found = [(one["part"], one.get("path"), one.get("file_offset"), one["length"]) for one in report["damage"]]
assert found == [("data", sys.argv[2], int(sys.argv[3]), 4096)], report
assert report["damaged_blocks"] == 1 and report["complete"] and not report["clean"], report
PYTHON
}

# One block of one file is spoiled: a scrub names it, reading it fails there and nowhere else, and
# all who look agree.
one_damaged_block() {
  local volume=$scratch/damage.ferry mnt=$scratch/mnt code
  timeout 60 "$ferry" mkfs "$volume" --size 2G
  mount_volume "$volume" "$mnt"
  mkdir "$mnt/dir"
  dd if=/dev/urandom of="$mnt/dir/a file" bs=1M count=20 status=none
  cp "$mnt/dir/a file" "$scratch/good"
  for code in 1 2 3 4; do dd if=/dev/urandom of="$mnt/other.$code" bs=64k count=50 status=none; done
  (cd "$mnt" && md5sum other.*) >"$scratch/others.md5"
  "$ferry" sync "$mnt"
  timeout 120 "$ferry" scrub "$mnt"
  unmount_volume "$mnt"
  timeout 120 "$ferry" scrub "$volume"
  local at; at=$(place_of "$volume" "dir/a file" 5000000)
  spoil "$volume" "$at"
  scrub_finds "$volume" "/dir/a file" 4997120
  timeout 60 "$ferry" mount "$volume" "$mnt"
  scrub_finds "$mnt" "/dir/a file" 4997120
  scrub_finds "$volume" "/dir/a file" 4997120 --rate 500M
  [ "$(stat_of "$mnt" scrub damaged_blocks)" = 1 ]
  [ "$(stat_of "$mnt" scrub state)" = complete ]
  # That block cannot be read, everything before and behind it can.
  if dd if="$mnt/dir/a file" bs=4096 skip=1220 count=1 status=none >/dev/null 2>"$scratch/dd.log"; then return 1; fi
  grep 'Input/output error' "$scratch/dd.log"
  if cat "$mnt/dir/a file" >/dev/null; then return 1; fi
  cmp -n 4997120 "$mnt/dir/a file" "$scratch/good"
  cmp -i 5001216 "$mnt/dir/a file" "$scratch/good"
  (cd "$mnt" && md5sum --quiet -c "$scratch/others.md5")
  # A block that is written anew is well again.
  dd if="$scratch/good" of="$mnt/dir/a file" bs=4096 skip=1220 seek=1220 count=1 conv=notrunc,fsync status=none
  timeout 120 "$ferry" scrub "$mnt"
  cmp "$mnt/dir/a file" "$scratch/good"
  unmount_volume "$mnt"
  # fsck reads the contents, too, and finds the same.
  at=$(place_of "$volume" "other.2" 70000)
  spoil "$volume" "$at"
  scrub_finds "$volume" "/other.2" 69632
  code=0; "$ferry" fsck "$volume" --json >"$scratch/fsck.json" || code=$?
  [ "$code" = 4 ]
  grep '"path": "/other.2"' "$scratch/fsck.json"
  grep '"file_offset": 69632' "$scratch/fsck.json"
}

# churn DIRECTORY: files are made, overwritten and removed there until $scratch/churned is there.
churn() {
  local n=0
  while ! [ -e "$scratch/churned" ]; do
    n=$((n + 1))
    dd if=/dev/urandom of="$1/$((n % 20))" bs=100k count=$((n % 7 + 1)) conv=fsync status=none
    rm -f "$1/$((n * 7 % 20))"
  done
}

# While files come and go a scrub finds nothing, at its rate; Ctrl-C ends it; nobody else may start
# one.
scrub_under_load() {
  local volume=$scratch/load.ferry mnt=$scratch/mnt code begun took writer scrub
  mount_volume "$volume" "$mnt" allow_other
  dd if=/dev/urandom of="$mnt/resting" bs=1M count=100 status=none
  "$ferry" sync "$mnt"
  mkdir "$mnt/dir"
  churn "$mnt/dir" &
  writer=$!
  for code in 1 2 3; do timeout 100 "$ferry" scrub "$mnt" --rate 0; done
  begun=$(now)
  timeout 100 "$ferry" scrub "$mnt" --rate 40M
  took=$(since "$begun")
  awk -v t="$took" 'BEGIN { exit !(t > 2.4) }' || { echo "100 MiB at 40 MiB/s in $took s"; return 1; }
  code=0; setpriv --reuid daemon --regid daemon --clear-groups -- "$ferry" scrub "$mnt" 2>"$scratch/refused" || code=$?
  [ "$code" = 1 ]; grep 'only root' "$scratch/refused"
  # One at a time, and Ctrl-C stops it.
  "$ferry" scrub "$mnt" --rate 1M >"$scratch/stopped" 2>&1 &
  scrub=$!
  until [ "$(stat_of "$mnt" scrub state)" = running ]; do :; done
  code=0; "$ferry" scrub "$mnt" 2>"$scratch/refused" || code=$?
  [ "$code" = 1 ]; grep 'on its way already' "$scratch/refused"
  kill -INT "$scrub"
  code=0; wait "$scrub" || code=$?
  [ "$code" = 1 ]; grep 'stopped before the end' "$scratch/stopped"
  [ "$(stat_of "$mnt" scrub state)" = stopped ]
  # Without anybody who looks on, it goes on until it is told.
  "$ferry" scrub "$mnt" --rate 1M >/dev/null 2>&1 &
  scrub=$!
  until [ "$(stat_of "$mnt" scrub state)" = running ]; do :; done
  kill -9 "$scrub"; wait "$scrub" || true
  [ "$(stat_of "$mnt" scrub state)" = running ]
  "$ferry" scrub "$mnt" --stop
  until [ "$(stat_of "$mnt" scrub state)" = stopped ]; do :; done
  # A mount ends, whether or not one is on its way.
  "$ferry" scrub "$mnt" --rate 1M >/dev/null 2>&1 &
  scrub=$!
  until [ "$(stat_of "$mnt" scrub state)" = running ]; do :; done
  kill -9 "$scrub"; wait "$scrub" || true
  touch "$scratch/churned"; wait "$writer"
  unmount_volume "$mnt"
  timeout 100 "$ferry" fsck "$volume"
}

# Every area of a volume, damaged in a copy of its file; what is no volume at all.
planted_faults() { timeout 560 python3 "$repo/scripts/suites/planted.py" "$ferry" "$scratch"; }

suite_damage() {
  say "--- damage"
  check "one damaged block: a scrub names it, EIO there alone" 200 one_damaged_block
  check "a scrub while files come and go" 200 scrub_under_load
  check "faults planted in every area: fsck, repair, mount, scrub, debug" 600 planted_faults
}
