# pjdfstest, fsx, git, two clients and a server that goes away, on remote mounts; sourced by
# scripts/test.
# shellcheck shell=bash

# The next port is that of a relay.
# Below the ports that the system gives to connections.
remote_port=$((12000 + 2 * ($$ % 10000)))

# serve_volume VOLUME [ARGUMENTS…]: its process number goes to $scratch/server.pid. One that an
# earlier check has left is killed.
serve_volume() {
  local volume=$1 tries log=$scratch/server.log plain=--insecure; shift
  [[ " $* " != *" --tls "* ]] || plain=
  [ ! -f "$scratch/server.pid" ] || stop_server KILL
  # Smaller than what the disk has free, so that statfs does not show what others write there.
  [ -f "$volume" ] || "$ferry" mkfs "$volume" --size 16G
  : >"$log"
  # It keeps nothing of the checks open: that would be a process that works on the mount.
  # No other client of an earlier server is left, so there is nobody to wait for.
  "$ferry" serve "$volume" --listen "127.0.0.1:$remote_port" --grace "${server_grace:-0s}" $plain "$@" >"$log" 2>&1 8>&- 9>&- &
  echo $! >"$scratch/server.pid"
  for ((tries = 0; tries < 300; tries++)); do
    if grep -q ' serving ' "$log"; then return 0; fi
    sleep 0.1
  done
  cat "$log"; return 1
}

# stop_server [SIGNAL]: it has ended when this returns.
stop_server() {
  local pid; pid=$(cat "$scratch/server.pid")
  rm "$scratch/server.pid"
  kill "-${1:-TERM}" "$pid" 2>/dev/null || return 0
  timeout 60 tail --pid="$pid" -f /dev/null
}

# beside DIRECTORY SECONDS: writes and stores to the same pages.
beside() { timeout 100 python3 "$repo/scripts/suites/beside.py" "$@"; }

# attributes local|remote DIRECTORY: what others than the owner change, and what is read.
attributes() { timeout 50 python3 "$repo/scripts/suites/attributes.py" "$@"; }

# overlay DIRECTORY: an overlay whose upper directory is below it; names of the lower one are
# replaced, moved and removed.
overlay() {
  local upper=$1/overlay lower=$scratch/lower merged=$scratch/merged
  mkdir -p "$lower/dir" "$merged" "$upper/up" "$upper/work"
  echo old >"$lower/changed"; echo gone >"$lower/removed"; echo here >"$lower/moved"; echo in >"$lower/dir/in"
  mount -t overlay overlay -o "lowerdir=$lower,upperdir=$upper/up,workdir=$upper/work" "$merged"
  echo new >"$merged/changed"; rm "$merged/removed"; mv "$merged/moved" "$merged/there"; rm -r "$merged/dir"; mkdir "$merged/dir"
  echo made >"$merged/dir/made"
  # Without a whiteout the old name would show the lower file again.
  [ "$(cd "$merged"; echo * dir/*)" = "changed dir there dir/made" ]
  [ "$(cat "$merged/changed" "$merged/there" "$merged/dir/made")" = "$(printf 'new\nhere\nmade')" ]
  umount "$merged"
  [ "$(stat -c %F "$upper/up/removed" "$upper/up/moved" | uniq)" = "character special file" ]
}

# fails COMMAND…: it does (`set -e` does not look at what follows a `!`).
fails() { if "$@"; then echo "it did not fail: $*"; return 1; fi; }

# mount_remote MOUNTPOINT [OPTIONS]: without TLS unless they say it. The suites look at set-id bits
# and device nodes, too.
mount_remote() {
  local plain=,insecure
  [[ "${2:-}" != *tls=* ]] || plain=
  mkdir -p "$1"
  timeout 60 "$ferry" mount "ferry://127.0.0.1:$remote_port/" "$1" -o "suid,dev,log=$scratch/client.log$plain${2:+,$2}"
}

remote_over() {
  local mount
  for mount in "$@"; do unmount_volume "$mount"; done
  stop_server
  timeout 100 "$ferry" fsck "$scratch/remote.ferry"
}

# Operations at one client, seen at the other at once.
two_clients() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a b=$scratch/b i writers waiter
  mount_remote "$a"; mount_remote "$b"
  for i in $(seq 1 20); do
    echo "$i" >"$a/f"; [ "$(cat "$b/f")" = "$i" ]
    mv "$b/f" "$b/g"; [ ! -e "$a/f" ]; [ -e "$a/g" ]
    echo more >>"$a/g"; [ "$(stat -c %s "$b/g")" = $((${#i} + 6)) ]
    rm "$b/g"; [ ! -e "$a/g" ]
  done
  # Appends of both, none lost, none torn.
  (for i in $(seq 1 200); do echo "a $i" >>"$a/log"; done) &
  writers=$!
  (for i in $(seq 1 200); do echo "b $i" >>"$b/log"; done) &
  wait "$writers" $!
  [ "$(grep -cE '^[ab] [0-9]+$' "$a/log")" = 400 ]
  # Locks.
  rm -f "$scratch/unlock"
  (flock 9; until [ -e "$scratch/unlock" ]; do sleep 0.02; done; echo first >>"$a/order") 9>"$a/lock" &
  until ! flock -n "$b/lock" true; do sleep 0.02; done
  flock "$b/lock" sh -c "echo second >>'$b/order'" &
  waiter=$!
  touch "$scratch/unlock"
  wait "$waiter"
  [ "$(tr '\n' ' ' <"$a/order")" = "first second " ]
  # A removed file lives on where it is open.
  echo kept >"$a/open"; exec 8<"$b/open"; rm "$a/open"; [ "$(cat <&8)" = kept ]; exec 8<&-
  remote_over "$a" "$b"
}

# Locks of open file descriptions (F_OFD_SETLK), which end with the last descriptor and with nothing
# before.
description_locks() {
  serve_volume "$scratch/remote.ferry"
  mount_remote "$scratch/a"; mount_remote "$scratch/b"
  timeout 50 python3 "$repo/scripts/suites/ofd.py" "$scratch/a" "$scratch/b"
  remote_over "$scratch/a" "$scratch/b"
}

# Bytes that are free on a mount.
free_on() { df --output=avail -B1 "$1" | tail -n 1; }

# If one client removes another's file, its space is free again, though the maker's kernel has kept
# it; but not while it is open.
removed_by_another() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a b=$scratch/b before tries
  mount_remote "$a"; mount_remote "$b"
  mkdir "$a/made"
  before=$(free_on "$b")
  head -c 40M /dev/urandom | split -b 1M - "$a/made/"
  sync -f "$a"
  mv "$b/made/aa" "$b/made/moved"
  exec 8<"$a/made/ab"
  rm "$b"/made/*
  for ((tries = 0; tries < 100; tries++)); do
    [ "$(free_on "$b")" -lt $((before - (3 << 20))) ] || break
    sleep 0.1
  done
  echo "free after $((tries / 10)) s"
  [ "$tries" -lt 100 ]
  [ "$(head -c 1M <&8 | wc -c)" = $((1 << 20)) ]
  exec 8<&-
  remote_over "$a" "$b"
}

# at_three DIR: a served volume at three mounts, which `mounts` names, with a directory.
at_three() {
  local mount
  serve_volume "$scratch/remote.ferry"
  mounts=("$scratch/a" "$scratch/b" "$scratch/c")
  for mount in "${mounts[@]}"; do mount_remote "$mount"; done
  mkdir "${mounts[0]}/$1"
}

# Random operations of three, every answer checked against one order; and it is leases that answer
# most questions.
one_order() {
  local mounts
  at_three one-order
  python3 "$repo/scripts/suites/oneorder.py" 4 "${FERRY_SEED:-$RANDOM}" "${mounts[@]/%//one-order}"
  [ "$(stat_of "${mounts[1]}" client_cache hits)" -gt 50 ]
  remote_over "${mounts[@]}"
}

# Directories are where the client that moved them last has put them, also for clients that know
# them from elsewhere.
moved_by_others() {
  local mounts
  at_three moved
  timeout 100 python3 "$repo/scripts/suites/moved.py" 8 "${FERRY_SEED:-$RANDOM}" "${mounts[@]/%//moved}"
  remote_over "${mounts[@]}"
}

# Readers everywhere while one writes: nobody sees less than what had returned.
what_has_returned() {
  local mounts
  at_three returned
  timeout 100 python3 "$repo/scripts/suites/returned.py" 2 "${mounts[0]}/returned" "${mounts[@]/%//returned}"
  remote_over "${mounts[@]}"
}

# Mappings of a file at two mounts.
mapped_at_two() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a b=$scratch/b
  mount_remote "$a"; mount_remote "$b"
  mkdir "$a/mappings"
  timeout 100 python3 "$repo/scripts/suites/mapped.py" "$1" "$a/mappings" "$b/mappings"
  remote_over "$a" "$b"
}

# A client that has stopped delays a change for one term of its leases, and sees the change when it
# goes on.
a_client_stands_still() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a b=$scratch/b begun client
  mount_remote "$a"; mount_remote "$b"
  echo old >"$a/still"; [ "$(stat -c %s "$b/still")" = 4 ]
  # The holder is older.
  client=$(pgrep -n -f "ferry.* mount .* $b ")
  kill -STOP "$client"
  begun=$(now)
  echo longer >"$a/still"
  since "$begun"
  [ "$(stat -c %s "$a/still")" = 7 ]
  kill -CONT "$client"
  [ "$(stat -c %s "$b/still")" = 7 ]
  remote_over "$a" "$b"
}

# The server stops, and crashes, under a client that works.
server_goes_away() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a i worker
  mount_remote "$a"
  mkdir "$a/work"
  (for i in $(seq 1 400); do echo "$i" >"$a/work/$i"; echo "$i" >>"$a/work/all"; done) &
  worker=$!
  for i in 100 200 300; do
    until [ -e "$a/work/$i" ]; do sleep 0.02; done
    stop_server; sleep 0.3; serve_volume "$scratch/remote.ferry"
  done
  wait "$worker"
  [ "$(ls "$a/work" | wc -l)" = 401 ]
  [ "$(wc -l <"$a/work/all")" = 400 ]
  remote_over "$a"
}

# A served mirror while a client writes: a side is replaced, the log grows, all is
# read and verified.
operations_while_served() {
  local volume=$scratch/served.ferry a=$scratch/a writer
  rm -f "$volume" "$scratch"/side.?
  "$ferry" mkfs "$volume" --size 512M --log-size 8M --device mirror "$scratch/side.a" "$scratch/side.b"
  serve_volume "$volume"; mount_remote "$a"
  (for i in $(seq 1 300); do head -c 100000 /dev/zero | tr '\0' "\\$((i % 7 + 1))" >"$a/$i"; sync "$a/$i"; done) &
  writer=$!
  "$ferry" replace "$volume" "$scratch/side.b" "$scratch/side.c"
  "$ferry" tune "$volume" --log-size 32M
  "$ferry" scrub "$volume"; "$ferry" trim "$volume"; "$ferry" sync "$volume"
  "$ferry" stats "$volume" --json | python3 -c 'import json, sys; assert json.load(sys.stdin)["log"]["bytes"] == 32 << 20'
  wait "$writer"
  unmount_volume "$a"; stop_server
  "$ferry" fsck "$volume"
  # The new side has everything.
  rm "$scratch/side.a"
  "$ferry" mount "$volume" "$a" -o "log=$scratch/client.log"
  python3 -c '
import sys
for n in range(1, 301):
    with open(f"{sys.argv[1]}/{n}", "rb") as file:
        assert file.read() == bytes([n % 7 + 1]) * 100000, n' "$a"
  unmount_volume "$a"; rm -f "$volume" "$scratch"/side.?
}

# The server is killed under a client that syncs what it makes: what it said is durable is there,
# and the client goes on.
server_is_killed() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a i name worker
  mount_remote "$a"
  mkdir -p "$a/synced"; sync "$a/synced"
  exec 8>>"$a/kept-open"; sync "$a/kept-open"; mkdir "$a/not-synced"
  # A change under way when the server dies may fail. The loop then repeats it under another name.
  : >"$scratch/synced"
  (for i in $(seq 1 250); do
    if echo "$i" >"$a/synced/$i" && sync "$a/synced/$i" && sync "$a/synced"; then echo "$i"; fi
  done >"$scratch/synced" 2>/dev/null) &
  worker=$!
  for i in 60 120 180; do
    until [ "$(wc -l <"$scratch/synced")" -ge "$i" ]; do sleep 0.02; done
    stop_server KILL; sleep 0.3; serve_volume "$scratch/remote.ferry"
  done
  wait "$worker"
  [ "$(wc -l <"$scratch/synced")" -gt 200 ]
  while read -r name; do [ "$(cat "$a/synced/$name")" = "$name" ]; done <"$scratch/synced"
  echo more >&8; exec 8>&-; [ "$(cat "$a/kept-open")" = more ]
  # The root was changed and not synced before the first crash: that is told, once.
  fails "$ferry" sync "$a"
  "$ferry" sync "$a"
  remote_over "$a"
}

# All that one client has seen of another is there when the server is back, and nobody's operation
# fails.
seen_by_another() {
  server_grace=10s serve_volume "$scratch/remote.ferry"
  local a=$scratch/a b=$scratch/b i mnt workers=()
  mount_remote "$a"; mount_remote "$b"
  mkdir "$a/shared"; echo zero >"$a/shared/seen"; "$ferry" sync "$a"; cat "$b/shared/seen" >/dev/null
  for mnt in "$a" "$b"; do
    # Files come and go under both, and each renames its own.
    (set -e; for ((i = 0; i < 200; i++)); do
      mkdir "$mnt/shared/${mnt##*/}-$i"; ln -s x "$mnt/shared/${mnt##*/}-$i/l"
      mv "$mnt/shared/${mnt##*/}-$i" "$mnt/shared/${mnt##*/}.$i"
      if ((i % 3)); then rm -r "$mnt/shared/${mnt##*/}.$i"; fi
      ls "$mnt/shared" >/dev/null
    done) >"$scratch/side.${mnt##*/}" 2>&1 &
    workers+=($!)
  done
  until [ -e "$a/shared/a.30" ]; do sleep 0.02; done
  echo first >"$a/shared/seen"; [ "$(cat "$b/shared/seen")" = first ]
  stop_server KILL
  server_grace=10s serve_volume "$scratch/remote.ferry"
  sync "$b/shared/seen"; [ "$(cat "$b/shared/seen")" = first ]
  for i in "${workers[@]}"; do wait "$i" || { cat "$scratch/side."*; return 1; }; done
  "$ferry" sync "$a"; "$ferry" sync "$b"
  for mnt in "$a" "$b"; do [ "$(cd "$mnt/shared" && echo [ab].*)" = "$(cd "$a/shared" && echo [ab].*)" ]; done
  remote_over "$a" "$b"
}

# Answered changes that were never synced are there when the next server has waited for its client.
server_is_killed_and_nothing_is_lost() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a i dir worker
  mount_remote "$a"
  # From here on the client is answered at once.
  mkdir "$a/load"; "$ferry" sync "$a"
  (set -e; for ((i = 0; i < 2000; i++)); do
    dir=$a/load/$((i / 100)); [ -d "$dir" ] || mkdir "$dir"
    echo "$i" >"$dir/$i.new"; echo more >>"$dir/$i.new"; mv "$dir/$i.new" "$dir/$i"
  done) &
  worker=$!
  until [ -d "$a/load/7" ]; do sleep 0.05; done
  stop_server KILL
  server_grace=10s serve_volume "$scratch/remote.ferry"
  wait "$worker"
  for ((i = 0; i < 2000; i++)); do [ "$(<"$a/load/$((i / 100))/$i")" = "$i"$'\n'more ]; done
  [ "$(find "$a/load" -type f | wc -l)" = 2000 ]
  # Nothing is told, for nothing is lost.
  "$ferry" sync "$a"
  remote_over "$a"
}

# A client that knows many inodes is at work again soon after the server was killed. FERRY_KNOWN
# says how many: 2000000 takes minutes to make.
killed_while_much_is_known() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a known=${FERRY_KNOWN:-20000} begun
  mount_remote "$a"
  # The second call's files are not synced, but for what the server has done by itself.
  local make='
import os, sys
top, count = sys.argv[1], int(sys.argv[2])
for n in range(count):
    dir = f"{top}/{n // 1000}"
    if n % 1000 == 0: os.makedirs(dir)
    os.close(os.open(f"{dir}/{n}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))'
  python3 -c "$make" "$a/known" "$known"
  "$ferry" sync "$a"
  python3 -c "$make" "$a/new" 5000
  stop_server KILL
  begun=$SECONDS
  server_grace=45s serve_volume "$scratch/remote.ferry"
  timeout 60 mkdir "$a/after"
  echo "$known inodes known: back after $((SECONDS - begun)) s"
  [ $((SECONDS - begun)) -le 15 ]
  [ "$(find "$a/new" -type f | wc -l)" = 5000 ]
  [ "$(find "$a/known" -type f | wc -l)" = "$known" ]
  # Nothing is told, for nothing is lost.
  "$ferry" sync "$a"
  remote_over "$a"
}

# Many clients at once, each of which knows much and has changes that nobody has synced, are back at
# work soon after the server was killed. FERRY_CLIENTS says how many, FERRY_KNOWN_EACH how many
# files each knows.
killed_under_many() {
  serve_volume "$scratch/remote.ferry"
  local many=${FERRY_CLIENTS:-6} known=${FERRY_KNOWN_EACH:-2000} n begun slowest makers=() mounts=()
  # Each makes and knows files that are synced; then it makes others until it is told to end, and
  # says how many there are.
  local work='
import os, sys
top, known, upto, ready, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
def make(name, n):
    dir = f"{top}/{name}{n // 500}"
    if n % 500 == 0: os.makedirs(dir, exist_ok=True)
    fd = os.open(f"{dir}/{n}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.write(fd, str(n).encode())
    os.close(fd)
for n in range(known): make("known", n)
fd = os.open(top, os.O_RDONLY); os.fsync(fd)
made = 0
while made < upto and not os.path.exists(stop):
    make("new", made)
    made += 1
    if made == 200: open(ready, "w").close()
print(made)'
  for ((n = 0; n < many; n++)); do
    mounts+=("$scratch/many-$n"); mount_remote "$scratch/many-$n"
    mkdir "$scratch/many-$n/of-$n"
  done
  rm -f "$scratch"/ready-* "$scratch/enough"
  for ((n = 0; n < many; n++)); do
    python3 -c "$work" "$scratch/many-$n/of-$n" "$known" 5000 "$scratch/ready-$n" "$scratch/enough" >"$scratch/made-$n" &
    makers+=($!)
  done
  for ((n = 0; n < many; n++)); do until [ -e "$scratch/ready-$n" ]; do sleep 0.2; done; done
  stop_server KILL
  begun=$(now)
  server_grace=45s serve_volume "$scratch/remote.ferry"
  # Each is at work again when this returns.
  for ((n = 0; n < many; n++)); do
    (timeout 100 mkdir "$scratch/many-$n/of-$n/after"; since "$begun" >"$scratch/back-$n"; echo >>"$scratch/back-$n") &
    makers+=($!)
  done
  for n in "${makers[@]:many}"; do wait "$n"; done
  slowest=$(cat "$scratch"/back-* | sort -n | tail -n 1)
  touch "$scratch/enough"
  for n in "${makers[@]:0:many}"; do wait "$n"; done
  echo "$many clients with $known files each: the last is back after $slowest s"
  awk -v s="$slowest" 'BEGIN { exit !(s <= 15) }'
  for ((n = 0; n < many; n++)); do
    [ "$(find "$scratch/many-$n/of-$n" -path '*/known*' -type f | wc -l)" = "$known" ]
    [ "$(find "$scratch/many-$n/of-$n" -path '*/new*' -type f | wc -l)" = "$(cat "$scratch/made-$n")" ]
    python3 -c '
import os, sys
for dir, _, files in os.walk(sys.argv[1]):
    for name in files:
        with open(os.path.join(dir, name)) as file: assert file.read() == name, (dir, name)' "$scratch/many-$n/of-$n"
    # Nothing is told, for nothing is lost.
    "$ferry" sync "$scratch/many-$n"
    [ "$(stat_of "$scratch/many-$n" connection lost_changes)" = 0 ]
  done
  remote_over "${mounts[@]}"
}

# A full volume: what was removed, here or by another client, is free for the next write, and df
# says so.
remote_full_volume() {
  local a=$scratch/a b=$scratch/b small=$scratch/small.ferry round other
  rm -f "$small"; "$ferry" mkfs "$small" --size 512M
  serve_volume "$small"
  mount_remote "$a"; mount_remote "$b"
  for round in 1 2 3 4; do
    dd if=/dev/zero of="$a/large" bs=1M 2>/dev/null && return 1
    [ "$(free_on "$a")" -lt $((2 << 20)) ]
    [ "$round" -lt 3 ] && rm "$a/large" || rm "$b/large"
    dd if=/dev/zero of="$a/next" bs=1M count=8
    mkdir "$b/made-$round"
    # The client that has made it still has it in its kernel, until it is told.
    [ "$(free_on "$b")" -gt $((100 << 20)) ]
    rm "$a/next"
  done
  # The reservation of another client that does not need it.
  for other in $(seq 1 300); do echo x >"$b/small-$other"; done
  dd if=/dev/zero of="$a/large" bs=1M 2>/dev/null && return 1
  [ "$(free_on "$b")" -lt $((2 << 20)) ]
  "$ferry" umount "$a"; "$ferry" umount "$b"
  stop_server
  timeout 100 "$ferry" fsck "$small"
  rm "$small"
}

# Files by their handles, as an NFS server asks for them.
file_handles() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a b=$scratch/b handles=$scratch/handles end
  mount_remote "$a"; mount_remote "$b"
  python3 "$repo/scripts/suites/handles.py" take "$a" "$handles"
  python3 "$repo/scripts/suites/handles.py" check "$a" "$handles"
  # They mean the same on another machine, and to another server.
  python3 "$repo/scripts/suites/handles.py" check "$b" "$handles"
  for end in TERM KILL; do
    "$ferry" sync "$a"
    stop_server "$end"
    server_grace=10s serve_volume "$scratch/remote.ferry"
    python3 "$repo/scripts/suites/handles.py" check "$a" "$handles"
  done
  remote_over "$a" "$b"
  # A mount of a part of the volume knows files only by the directories in which it has found them:
  # others are refused, and nothing waits.
  serve_volume "$scratch/remote.ferry"
  mkdir -p "$a"
  "$ferry" mount "ferry://127.0.0.1:$remote_port/dir" "$a" -o "suid,dev,insecure,log=$scratch/client.log"
  fails python3 "$repo/scripts/suites/handles.py" check "$a" "$handles"
  timeout 20 ls -lR "$a" >/dev/null
  remote_over "$a"
}

# A file that is removed while a program has it open stays there for the program, whatever becomes
# of the server.
removed_while_open() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a b=$scratch/b end
  mount_remote "$a"; mount_remote "$b"
  exec 8<>"$a/mine" 9<>"$a/theirs"
  echo mine >&8; head -c 300000 /dev/zero | tr '\0' x >&9
  "$ferry" sync "$a"
  rm "$a/mine" "$b/theirs"
  for end in KILL TERM; do
    # Durable without anybody's word.
    sleep 3
    stop_server "$end"
    server_grace=10s serve_volume "$scratch/remote.ferry"
    python3 -c '
import os
assert os.pread(8, 100, 0) == b"mine\n"
whole = os.pread(9, 400000, 0)
assert len(whole) == 300000 and not whole.strip(b"xy"), len(whole)
assert os.pwrite(9, b"y", 7) == 1 and os.pread(9, 3, 6) == b"xyx"
os.fsync(9)'
  done
  exec 8>&- 9>&-
  remote_over "$a" "$b"
}

# Nobody hangs for good when the server does not come back.
server_never_comes_back() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a reader said status=0
  mount_remote "$a" timeout=2s
  echo x >"$a/f"
  stop_server
  fails timeout 20 cat "$a/f"
  # Nothing can be synced: it is unmounted, and said.
  said=$(timeout 20 "$ferry" umount "$a" 2>&1) || status=$?
  [ "$status" = 1 ]
  grep -F 'unmounted, but its server did not say that everything is durable' <<<"$said"
  [ -z "$(mounts_below "$a")" ]
  serve_volume "$scratch/remote.ferry"
  mount_remote "$a"
  stop_server
  cat "$a/f" & reader=$!
  sleep 0.5
  kill "$reader"; timeout 10 tail --pid="$reader" -f /dev/null
  # Without --force there is nothing to be done in this time; with it nothing is waited for.
  said=$(timeout 20 "$ferry" umount --timeout 1s "$a" 2>&1) || status=$?
  grep -F 'its server has not answered after 1 s' <<<"$said"
  [ -n "$(mounts_below "$a")" ]
  timeout 5 "$ferry" umount --force "$a"
  # The message says what may be lost.
  serve_volume "$scratch/remote.ferry"
  mount_remote "$a"
  mkdir "$a/forced"; echo x >"$a/forced/x"
  stop_server KILL
  # It may take a moment until that is noticed.
  until timeout 5 "$ferry" stats "$a" | grep -E 'connected +no'; do sleep 0.1; done
  status=0; said=$(timeout 5 "$ferry" umount --force "$a" 2>&1) || status=$?
  [ "$status" = 1 ]; [ -z "$(mounts_below "$a")" ]
  grep -F 'unmounted without its server' <<<"$said"
  timeout 100 "$ferry" fsck "$scratch/remote.ferry"
}

# Commands for the machine that has the volume say so.
said_where() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a said
  mount_remote "$a"
  said=$("$ferry" scrub "$a" 2>&1) && return 1
  grep -F "mounted from ferry://127.0.0.1:$remote_port/: that is for the machine that has the volume" <<<"$said"
  said=$("$ferry" tune "$a" --flush each 2>&1) && return 1
  grep -F 'that is for the machine' <<<"$said"
  said=$("$ferry" fsck "$scratch/remote.ferry" 2>&1) && return 1
  grep -F "by process $(cat "$scratch/server.pid"), \`ferry serve\`: stop that first" <<<"$said"
  said=$("$ferry" cert issue "$scratch/no-authority" laptop 2>&1) && return 1
  grep -F 'there is no authority' <<<"$said"
  remote_over "$a"
}

# With certificates of our own, and not without.
certificates() {
  "$ferry" cert init "$scratch/tls" --host 127.0.0.1
  "$ferry" cert issue "$scratch/tls" laptop
  fails "$ferry" serve "$scratch/remote.ferry" --listen "0.0.0.0:$remote_port"
  fails "$ferry" serve "$scratch/remote.ferry" --listen "127.0.0.1:$remote_port"
  serve_volume "$scratch/remote.ferry" --tls "$scratch/tls"
  fails mount_remote "$scratch/a"
  mount_remote "$scratch/a" "tls=$scratch/tls/laptop"
  echo x >"$scratch/a/x"; [ "$(cat "$scratch/a/x")" = x ]
  remote_over "$scratch/a"
}

# A user of this machine is nobody at a server without --insecure; what a server has gives nobody
# privileges unless root has said so.
trusted_only_if_asked_for() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a b=$scratch/b said
  mkdir -p "$a" "$b"
  said=$("$ferry" mount "ferry://127.0.0.1:$remote_port/" "$a" 2>&1) && return 1
  grep -F -- '-o insecure' <<<"$said"
  "$ferry" mount "ferry://127.0.0.1:$remote_port/" "$a" -o insecure
  mount_remote "$b"
  cp /usr/bin/id "$b/id"; chmod 4755 "$b/id"; mknod -m 666 "$b/null" c 1 3
  grep " $a fuse.ferry [^ ]*nosuid,nodev" /proc/self/mounts
  [ "$(as_user 1000 "$a/id" -u)" = 1000 ]
  fails dd if=/dev/zero of="$a/null" bs=1 count=1
  "$ferry" mount "ferry://127.0.0.1:$remote_port/" "$a" -o remount,ro
  grep " $a fuse.ferry ro,nosuid,nodev" /proc/self/mounts
  [ "$(as_user 1000 "$b/id" -u)" = 0 ]
  echo x >"$b/null"
  remote_over "$a" "$b"
}

# as_user ID COMMAND…
as_user() { local id=$1; shift; setpriv --reuid "$id" --regid "$id" --clear-groups "$@"; }

# A certificate for one user; then it is taken back.
limited_and_revoked() {
  local a=$scratch/a b=$scratch/b tls=$scratch/limited said status=0
  "$ferry" cert init "$tls" --host 127.0.0.1
  "$ferry" cert issue "$tls" laptop --users 1000
  "$ferry" cert issue "$tls" desktop
  serve_volume "$scratch/remote.ferry" --tls "$tls"
  mount_remote "$a" "tls=$tls/laptop"; mount_remote "$b" "tls=$tls/desktop"
  mkdir -m 777 "$b/open"; echo secret >"$b/open/secret"; chmod 600 "$b/open/secret"
  # Its user works as ever.
  as_user 1000 sh -ec "mkdir '$a/open/d'; echo mine >'$a/open/d/f'; mv '$a/open/d/f' '$a/open/f'; sync '$a/open/f'"
  [ "$(stat -c %u:%g "$b/open/f")" = 1000:1000 ]; [ "$(cat "$b/open/f")" = mine ]
  fails as_user 1000 cat "$a/open/secret"
  # Its root, and another user, are nobody.
  fails touch "$a/open/root"
  fails cat "$a/open/secret"
  fails rm "$a/open/f"
  fails chown 0:0 "$a/open/f"
  fails as_user 1001 touch "$a/open/other"
  [ "$(ls "$b/open" | tr '\n' ' ')" = "d f secret " ]
  "$ferry" cert revoke "$tls" laptop
  # Its session ends soon.
  timeout 20 sh -c "while setpriv --reuid 1000 --regid 1000 --clear-groups touch '$a/open/late' 2>/dev/null; do sleep 0.1; done"
  said=$(timeout 20 "$ferry" umount "$a" 2>&1) || status=$?
  [ "$status" = 1 ]
  said=$(mount_remote "$a" "tls=$tls/laptop" 2>&1) && return 1
  grep -F "certificate (laptop) was revoked" <<<"$said"
  remote_over "$b"
}

# The list of clients; evicting one that holds a lock.
clients_and_evict() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a b=$scratch/b holder said status=0
  mount_remote "$a"; mount_remote "$b"
  echo x >"$a/f"
  (exec 9<"$a/f"; flock 9; exec sleep 60) & holder=$!
  until ! flock -n "$b/f" true; do sleep 0.1; done
  "$ferry" clients | grep -F "$scratch/remote.ferry at 127.0.0.1:$remote_port"
  [ "$("$ferry" clients --json | python3 -c "
import json, sys
mine = [s for s in json.load(sys.stdin) if s['volume'] == '$scratch/remote.ferry']
print([(c['client'], c['connected'], c['locks']) for c in mine[0]['clients']])")" = "[(1, True, 1), (2, True, 0)]" ]
  fails "$ferry" evict nobody --volume "$scratch/remote.ferry"
  "$ferry" evict 1 --volume "$scratch/remote.ferry"
  timeout 20 flock "$b/f" true
  fails touch "$a/f"
  kill "$holder"; wait "$holder" || true
  said=$(timeout 20 "$ferry" umount "$a" 2>&1) || status=$?
  [ "$status" = 1 ]
  grep -F 'unmounted, but its server did not say that everything is durable' <<<"$said"
  grep -F "was ended by the server's administrator" <<<"$said"
  fails grep -F 'server is away' <<<"$said"
  mount_remote "$a"
  [ "$(cat "$a/f")" = x ]
  remote_over "$a" "$b"
}

# remote_program COMMAND…: it works in $scratch/mnt.
remote_program() {
  serve_volume "$scratch/remote.ferry"
  mount_remote "$scratch/mnt"
  "$@"
  remote_over "$scratch/mnt"
}

remote_fsx() {
  serve_volume "$scratch/remote.ferry"
  mount_remote "$scratch/a"
  mkdir -p "$scratch/artifacts-remote"
  "$tools/bin/fsx" -f "$repo/scripts/suites/fsx.toml" -N "$1" -S "${FERRY_SEED:-$RANDOM}" -P "$scratch/artifacts-remote" "$scratch/a/fsx"
  remote_over "$scratch/a"
}

# slow_relay RATE: clients that mount at port `relay_port` send no faster; its process number goes
# to $scratch/relay.pid.
slow_relay() {
  local tries log=$scratch/relay.log relay
  relay=$(dirname "$ferry")/examples/relay
  [ -x "$relay" ] || { relay=$target/release/examples/relay; cargo build --release --quiet --package ferry-bench --example relay; }
  relay_port=$((remote_port + 1))
  "$relay" --listen "127.0.0.1:$relay_port" --to "127.0.0.1:$remote_port" --up "$1" --delay 1ms >"$log" 2>&1 </dev/null 8>&- 9>&- &
  echo $! >"$scratch/relay.pid"
  for ((tries = 0; tries < 100; tries++)); do
    if grep -q '^listening' "$log"; then return 0; fi
    sleep 0.05
  done
  cat "$log"; return 1
}

# slow_connection RATE BYTES ROUNDS: a client that fills its slow line is not taken for a silent
# one, and loses nothing, while another looks on.
slow_connection() {
  local a=$scratch/a b=$scratch/b round copying
  serve_volume "$scratch/remote.ferry"
  slow_relay "$1"
  mkdir -p "$a"
  remote_port=$relay_port mount_remote "$a"
  mount_remote "$b"
  head -c "$2" /dev/urandom >"$scratch/slow"
  for ((round = 0; round < $3; round++)); do
    (cp "$scratch/slow" "$a/part" && mv "$a/part" "$a/whole-$round") & copying=$!
    until [ -s "$a/part" ] || [ -e "$a/whole-$round" ]; do sleep 0.05; done
    ls -l "$b" >/dev/null
    wait "$copying"
    cmp "$scratch/slow" "$b/whole-$round"
    "$ferry" sync "$a"
    rm "$b/whole-$round"
  done
  fails grep -F 'it has lost its write leases' "$scratch/server.log"
  [ "$(stat_of "$a" connection epoch)" = 0 ]
  [ "$(stat_of "$a" connection lost_changes)" = 0 ]
  "$ferry" umount "$a"; "$ferry" umount "$b"
  kill "$(cat "$scratch/relay.pid")"
  remote_over
}

# A longer run of the same: FERRY_SLOW_ROUNDS=20 scripts/test remote, with FERRY_ONLY='slow
# connection'.
slow_connections() {
  local rounds=${FERRY_SLOW_ROUNDS:-0} rate
  if [ "$rounds" -gt 0 ]; then
    for rate in 1 4 10 100; do check "a slow connection, $rate Mbit/s, $rounds rounds" 3600 slow_connection "${rate}Mbit" 14M "$rounds"; done
    return
  fi
  check "a slow connection, 10 Mbit/s" 60 slow_connection 10Mbit 14M 1
  check "a slow connection, 4 Mbit/s" 60 slow_connection 4Mbit 6M 1
}

# suite_remote FSX-OPERATIONS
suite_remote() {
  say "--- remote mounts"
  check "two clients" 120 two_clients
  check "locks of open file descriptions" 60 description_locks
  check "three clients, one order" 60 one_order
  check "directories are where others have moved them" 120 moved_by_others
  check "readers see what has returned" 120 what_has_returned
  check "mappings see what others write" 120 mapped_at_two 40
  check "writes beside stores lose nothing" 120 remote_program beside "$scratch/mnt" 9
  check "attributes beside changes by others" 60 remote_program attributes remote "$scratch/mnt"
  check "an overlay has its upper directory here" 60 remote_program overlay "$scratch/mnt"
  check "a client stands still" 60 a_client_stands_still
  check "operations on a served volume" 100 operations_while_served
  check "what another client removes is free" 60 removed_by_another
  check "a full volume has the space of what was removed" 120 remote_full_volume
  check "files are found by their handles" 120 file_handles
  check "commands that are for another machine" 60 said_where
  check "certificates" 60 certificates
  check "nobody is trusted unless that was asked for" 60 trusted_only_if_asked_for
  check "a certificate for certain users, and taken back" 60 limited_and_revoked
  check "ferry clients, ferry evict" 60 clients_and_evict
  # A small one: every operation is a round trip.
  git init -q "$scratch/git-source"
  cp -r "$repo/crates/ferry-net/src" "$scratch/git-source"
  git -C "$scratch/git-source" add .
  git -C "$scratch/git-source" -c user.name=test -c user.email=test commit -qm first
  git -C "$scratch/git-source" -c user.name=test -c user.email=test commit -qm second --allow-empty
  check "git clone, fsck, gc on a remote mount" 120 remote_program program_git "$scratch/git-source"
  check "tar, cp -a, rsync with xattrs, ACLs, devices, holes, remote" 120 remote_program program_archive
  check "sqlite3, killed and recovered, remote" 120 remote_program program_sqlite 4000
  check "fsync under a rain of signals, remote" 60 remote_program program_signals
  check "fsx on a remote mount" 120 remote_fsx "$1"
  serve_volume "$scratch/remote.ferry"
  mount_remote "$scratch/mnt"
  mkdir -p "$scratch/other"
  # Remounting a directory read-only concerns the kernel alone, and is tested on a local mount.
  sed 's/^allow_remount = .*/allow_remount = false/' "$repo/scripts/suites/pjdfstest.toml" >"$scratch/no-remount.toml"
  pjdfstest_run -c "$scratch/no-remount.toml"
  check "unmount and fsck after pjdfstest on a remote mount" 120 remote_over "$scratch/mnt"
}

# The server stops, crashes or is slow.
suite_away() {
  say "--- servers that go away"
  check "the server stops and crashes under work" 120 server_goes_away
  check "the server is killed under work that is synced" 120 server_is_killed
  check "the server is killed under work that is not synced" 120 server_is_killed_and_nothing_is_lost
  check "the server is killed under a client that knows much" "${FERRY_KNOWN_TIME:-120}" killed_while_much_is_known
  check "the server is killed under many clients" "${FERRY_MANY_TIME:-120}" killed_under_many
  check "what another client has seen outlives the server" 60 seen_by_another
  check "a file that is removed while open outlives the server" 120 removed_while_open
  check "the server never comes back" 120 server_never_comes_back
  slow_connections
}
