# pjdfstest, fsx, git, two clients and a server that goes away, on remote mounts; sourced by scripts/test.
# shellcheck shell=bash

remote_port=$((20000 + $$ % 20000))

# serve_volume VOLUME [ARGUMENTS…]: its process number goes to $scratch/server.pid. One that an earlier check has left is killed.
serve_volume() {
  local volume=$1 tries log=$scratch/server.log; shift
  [ ! -f "$scratch/server.pid" ] || stop_server KILL
  [ -f "$volume" ] || "$ferry" mkfs "$volume"
  : >"$log"
  # It keeps nothing of the checks open: that would be a process that works on the mount.
  # No other client of an earlier server is left, so there is nobody to wait for.
  "$ferry" serve "$volume" --listen "127.0.0.1:$remote_port" --grace "${server_grace:-0s}" "$@" >"$log" 2>&1 8>&- 9>&- &
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

# fails COMMAND…: it does (`set -e` does not look at what follows a `!`).
fails() { if "$@"; then echo "it did not fail: $*"; return 1; fi; }

# mount_remote MOUNTPOINT [OPTIONS]
mount_remote() {
  mkdir -p "$1"
  timeout 60 "$ferry" mount "ferry://127.0.0.1:$remote_port/" "$1" -o "log=$scratch/client.log${2:+,$2}"
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
  local a=$scratch/a b=$scratch/b i writers
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
  (flock 9; sleep 1; echo first >>"$a/order") 9>"$a/lock" &
  sleep 0.5
  fails flock -n "$b/lock" true
  flock "$b/lock" sh -c "echo second >>'$b/order'"
  [ "$(tr '\n' ' ' <"$a/order")" = "first second " ]
  # What was removed lives on where it is open.
  echo kept >"$a/open"; exec 8<"$b/open"; rm "$a/open"; [ "$(cat <&8)" = kept ]; exec 8<&-
  remote_over "$a" "$b"
}

# Bytes that are free on a mount.
free_on() { df --output=avail -B1 "$1" | tail -n 1; }

# What one client has made and another removes is free again, though the maker's kernel has kept it; but not while it is open.
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

# Random operations of three, every answer checked against one order; and it is leases that answer most questions.
one_order() {
  serve_volume "$scratch/remote.ferry"
  local mounts=("$scratch/a" "$scratch/b" "$scratch/c") mount
  for mount in "${mounts[@]}"; do mount_remote "$mount"; done
  mkdir "${mounts[0]}/one-order"
  python3 "$repo/scripts/suites/oneorder.py" 4 "${FERRY_SEED:-$RANDOM}" "${mounts[@]/%//one-order}"
  [ "$(stat_of "${mounts[1]}" kept hits)" -gt 50 ]
  remote_over "${mounts[@]}"
}

# Directories are where the client that moved them last has put them, for who knows them from elsewhere too.
moved_by_others() {
  serve_volume "$scratch/remote.ferry"
  local mounts=("$scratch/a" "$scratch/b" "$scratch/c") mount
  for mount in "${mounts[@]}"; do mount_remote "$mount"; done
  mkdir "${mounts[0]}/moved"
  timeout 100 python3 "$repo/scripts/suites/moved.py" 8 "${FERRY_SEED:-$RANDOM}" "${mounts[@]/%//moved}"
  remote_over "${mounts[@]}"
}

# Readers everywhere while one writes: nobody sees less than what had returned.
what_has_returned() {
  serve_volume "$scratch/remote.ferry"
  local mounts=("$scratch/a" "$scratch/b" "$scratch/c") mount
  for mount in "${mounts[@]}"; do mount_remote "$mount"; done
  mkdir "${mounts[0]}/returned"
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

# A client that has stopped delays a change for one term of its leases, and sees the change when it goes on.
a_client_stands_still() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a b=$scratch/b begun client
  mount_remote "$a"; mount_remote "$b"
  echo old >"$a/still"; [ "$(stat -c %s "$b/still")" = 4 ]
  client=$(pgrep -f "ferry.* mount .* $b ")
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
  for i in 1 2 3; do
    sleep 1; stop_server; sleep 0.3; serve_volume "$scratch/remote.ferry"
  done
  wait "$worker"
  [ "$(ls "$a/work" | wc -l)" = 401 ]
  [ "$(wc -l <"$a/work/all")" = 400 ]
  remote_over "$a"
}

# The server is killed under a client that syncs what it makes: what it said is durable is there, and the client goes on.
server_is_killed() {
  serve_volume "$scratch/remote.ferry"
  local a=$scratch/a i name worker
  mount_remote "$a"
  mkdir -p "$a/synced"; sync "$a/synced"
  exec 8>>"$a/kept-open"
  # What was under way when the server died may fail, and is made again, under another name.
  (for i in $(seq 1 250); do
    if echo "$i" >"$a/synced/$i" && sync "$a/synced/$i" && sync "$a/synced"; then echo "$i"; fi
  done >"$scratch/synced" 2>/dev/null) &
  worker=$!
  for i in 1 2 3; do
    sleep 0.7; stop_server KILL; sleep 0.3; serve_volume "$scratch/remote.ferry"
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

# What one client has seen of another is there when the server is back, and nobody's operation fails.
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

# What was answered and never synced is there when the next server has waited for its client.
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

# What was removed while a program has it open is still there for the program, whatever becomes of the server.
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
  # What it takes with it is said.
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

# What is for the machine that has the volume, or for who has it to himself, says so.
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
  serve_volume "$scratch/remote.ferry" --tls "$scratch/tls"
  fails mount_remote "$scratch/a"
  mount_remote "$scratch/a" "tls=$scratch/tls/laptop"
  echo x >"$scratch/a/x"; [ "$(cat "$scratch/a/x")" = x ]
  remote_over "$scratch/a"
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
  "$ferry" evict laptop --volume "$scratch/remote.ferry"
  fails as_user 1000 touch "$a/open/late"
  said=$(timeout 20 "$ferry" umount "$a" 2>&1) || status=$?
  [ "$status" = 1 ]
  said=$(mount_remote "$a" "tls=$tls/laptop" 2>&1) && return 1
  grep -F CertificateRevoked <<<"$said"
  remote_over "$b"
}

# Who is there, and how to be rid of one that holds a lock.
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

# suite_remote FSX-OPERATIONS
suite_remote() {
  say "--- remote mounts"
  check "two clients" 120 two_clients
  check "three clients, one order" 60 one_order
  check "directories are where others have moved them" 120 moved_by_others
  check "readers see what has returned" 120 what_has_returned
  check "mappings see what others write" 120 mapped_at_two 40
  check "a client stands still" 60 a_client_stands_still
  check "the server stops and crashes under work" 120 server_goes_away
  check "what another client removes is free" 60 removed_by_another
  check "the server is killed under work that is synced" 120 server_is_killed
  check "the server is killed under work that is not synced" 120 server_is_killed_and_nothing_is_lost
  check "what another client has seen outlives the server" 60 seen_by_another
  check "a file that is removed while open outlives the server" 120 removed_while_open
  check "the server never comes back" 120 server_never_comes_back
  check "commands that are for another machine" 60 said_where
  check "certificates" 60 certificates
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
