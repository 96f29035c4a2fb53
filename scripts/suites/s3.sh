# Stores that speak S3, on loopback: what every store must do, the tests of the device, and whole
# volumes on them.
# shellcheck shell=bash

# start_s3_store PROGRAM DIRECTORY: an empty store with the bucket ferry-test, on a free port.
start_s3_store() {
  # A bucket is a directory, to both programs.
  rm -rf "$2"
  mkdir -p "$2/ferry-test"
  s3_port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  run_s3_store "$1" "$2"
}

# run_s3_store PROGRAM DIRECTORY: on $s3_port. Sets $s3_server and exports what its users need.
run_s3_store() {
  local program=$1 directory=$2 port=$s3_port tries=0
  export AWS_ACCESS_KEY_ID=ferry-test AWS_SECRET_ACCESS_KEY=ferry-secret AWS_REGION=us-east-1
  export AWS_ENDPOINT_URL=http://127.0.0.1:$port
  case $program in
    versitygw)
      ROOT_ACCESS_KEY=$AWS_ACCESS_KEY_ID ROOT_SECRET_KEY=$AWS_SECRET_ACCESS_KEY \
        "$tools/bin/versitygw" --port "127.0.0.1:$port" posix "$directory" >"$directory.log" 2>&1 &
      ;;
    minio)
      MINIO_ROOT_USER=$AWS_ACCESS_KEY_ID MINIO_ROOT_PASSWORD=$AWS_SECRET_ACCESS_KEY \
        MINIO_BROWSER=off MINIO_UPDATE=off MINIO_CALLHOME_ENABLE=off \
        "$tools/bin/minio" server --quiet --address "127.0.0.1:$port" "$directory" >"$directory.log" 2>&1 &
      ;;
    *) die "no store is called $program" ;;
  esac
  s3_server=$!
  until (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
    tries=$((tries + 1))
    if [ "$tries" = 300 ] || ! kill -0 "$s3_server" 2>/dev/null; then
      tail -n 20 "$directory.log"
      return 1
    fi
    sleep 0.1
  done
}

# A check runs in a process of its own: the store that it has started is known by its port.
find_s3_store() { s3_server=$(pgrep -n -f -- "--port 127.0.0.1:$s3_port|--address 127.0.0.1:$s3_port"); }

stop_s3_store() { kill "$s3_server"; wait "$s3_server" 2>/dev/null || true; }

# The tests that take any store, on one of these.
tests_on_s3_store() {
  local code=0
  start_s3_store "$1" "$scratch/s3-$1"
  # `--workspace` keeps cargo from building everything with another set of features.
  FERRY_TEST_STORE=s3://ferry-test cargo test --release --workspace --quiet --test store --test device || code=$?
  [ "$code" = 0 ] || tail -n 20 "$scratch/s3-$1.log"
  stop_s3_store
  return "$code"
}

# s3_stuck URL: what the daemon of a mount waits for, if a command on it does not end.
s3_stuck() {
  local task
  timeout 5 "$ferry" stats "$scratch/mnt" --json | head -c 6000 || true
  for task in /proc/"$(pgrep -n -f -- "mount $1 ")"/task/*; do
    echo "$(cat "$task/comm") $(cat "$task/wchan") $(cat "$task/syscall")"
  done
  return 1
}

# s3_away URL: while the store is away nothing fails. A sync waits, and its exit code follows. What
# needs no part of the volume that is only in the store goes on: its caller has made a first copy
# there, whose metadata is in memory or in the cache on disk.
s3_away() {
  timeout 30 cp -r "$repo/docs" "$scratch/mnt/away/second" || s3_stuck "$1"
  { "$ferry" sync "$scratch/mnt"; echo $? >"$scratch/s3-synced"; } >/dev/null 2>&1 &
  # The mount itself answers, as everything is in memory.
  until stat_of "$scratch/mnt" store held reason 2>/dev/null; do sleep 0.2; done
  "$ferry" top "$scratch/mnt" --interval 100ms --count 1 | grep 'held for'
  diff -r "$repo/docs" "$scratch/mnt/away/second"
  [ ! -e "$scratch/s3-synced" ]
}

# s3_back URL: the store is there again.
s3_back() {
  until [ -e "$scratch/s3-synced" ]; do sleep 0.2; done
  [ "$(cat "$scratch/s3-synced")" = 0 ]
  kill_mount_of "$(stat_of "$scratch/mnt" fuse daemon)"
  mount_volume "$1" "$scratch/mnt"
  diff -r "$repo/docs" "$scratch/mnt/away/second"
  object_clean "$1"
}

# s3_postgres URL: kill -9 of the daemon below PostgreSQL. Everything that it had committed is there.
s3_postgres() {
  local bin data=$scratch/mnt/postgres daemon server client begun=0
  bin=$(ls -d /usr/lib/postgresql/*/bin | sort -V | tail -n 1)
  mount_volume "$1" "$scratch/mnt"
  chmod 755 "$scratch/mnt"
  install -d -o postgres -g postgres "$scratch/pg"; install -d -m 700 -o postgres -g postgres "$data"
  start() { postgres "$bin/pg_ctl" -s -w -D "$data" -l "$scratch/pg/log" -o "-k $scratch/pg -c listen_addresses=''" start; }
  postgres "$bin/initdb" -D "$data" --no-instructions >/dev/null
  start
  postgres "$bin/pgbench" -q -i -s 2 postgres
  postgres "$bin/psql" -XqAt postgres -c 'create table committed (n integer primary key)'
  # The load beside it.
  postgres "$bin/pgbench" -n -c 4 -j 2 -T 300 postgres >"$scratch/pg/bench" 2>&1 &
  client=$!
  seq 1000000 | sed 's/.*/insert into committed values (&) returning n;/' |
    postgres "$bin/psql" -XqAt -v ON_ERROR_STOP=1 postgres >"$scratch/acknowledged" 2>/dev/null &
  until [ "$(acknowledged)" -ge 200 ]; do sleep 0.1; done
  daemon=$(stat_of "$scratch/mnt" fuse daemon) server=$(head -n 1 "$data/postmaster.pid")
  kill_mount_of "$daemon"
  # Each is killed by its own number; the children first lose their parent.
  kill -9 "$server" $(pgrep -P "$server") || true
  wait "$client" || true
  rm -f "$scratch"/pg/.s.PGSQL.*
  mount_volume "$1" "$scratch/mnt"
  rm -f "$data/postmaster.pid"
  start
  say "$(acknowledged) acknowledged, $(postgres "$bin/psql" -XAt postgres -c 'select count(*) from committed') there"
  postgres "$bin/psql" -XAt postgres -c "select n from committed where n <= $(acknowledged) order by n" |
    cmp - "$scratch/acknowledged"
  postgres "$bin/pg_amcheck" --all --heapallindexed --install-missing
  postgres "$bin/pg_ctl" -s -w -D "$data" -m fast stop
  object_clean "$1"
}

# s3_fstab URL: mount(8) and a line of fstab, with keys of the environment and of a profile. The
# helper and root's profile are in place for this check alone, in its own mount namespace.
s3_fstab() {
  mkdir -p "$scratch/overlay" "$scratch/mnt"
  export scratch ferry url=$1
  # shellcheck disable=SC2016
  unshare --mount --propagation private bash -euc '
    mounted() { findmnt -n -o SOURCE,FSTYPE,OPTIONS "$scratch/mnt"; }
    mount -t tmpfs none "$scratch/overlay"
    mkdir "$scratch/overlay/upper" "$scratch/overlay/work"
    mount -t overlay none -o "lowerdir=/usr/sbin,upperdir=$scratch/overlay/upper,workdir=$scratch/overlay/work" /usr/sbin
    ln -sf "$ferry" /usr/sbin/mount.fuse.ferry
    mount -t fuse.ferry "$url" "$scratch/mnt" -o noatime,nodev,flush_interval_min=20ms
    mounted | grep "^$url?endpoint=$AWS_ENDPOINT_URL *fuse.ferry .*nodev"
    echo through the helper >"$scratch/mnt/fstab"
    umount "$scratch/mnt"

    endpoint=$AWS_ENDPOINT_URL profiles=$(getent passwd root | cut -d: -f6)/.aws
    if [ ! -d "$profiles" ]; then
      mkdir "$profiles"
      trap "umount -l \"$profiles\"; rmdir \"$profiles\"" EXIT
    fi
    mount -t tmpfs none "$profiles"
    printf "[work]\naws_access_key_id = %s\naws_secret_access_key = %s\n" "$AWS_ACCESS_KEY_ID" "$AWS_SECRET_ACCESS_KEY" >"$profiles/credentials"
    printf "[profile work]\nregion = %s\n" "$AWS_REGION" >"$profiles/config"
    source="$url?endpoint=$endpoint&profile=work"
    options="_netdev,nofail,x-systemd.automount,cache=$scratch/cache,cache_disk=64M"
    echo "$source $scratch/mnt fuse.ferry $options 0 0" >"$scratch/fstab"
    unset AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_REGION AWS_ENDPOINT_URL
    # At a boot; the second time it is there already. What umount left to the daemon is waited for.
    for turn in 1 2; do
      mount -T "$scratch/fstab" -a
      mount -T "$scratch/fstab" -a
      mounted | grep -F "$source"
      grep "through the helper" "$scratch/mnt/fstab"
      head -c 10M /dev/urandom >"$scratch/mnt/more"
      umount "$scratch/mnt"
    done
    mount -T "$scratch/fstab" "$source"
    "$ferry" warm "$scratch/mnt/more"
    mount -o remount,ro "$scratch/mnt"
    if touch "$scratch/mnt/other" 2>/dev/null; then exit 1; fi
    rm -rf "$scratch/cache"
    "$ferry" umount "$source"
    "$ferry" fsck "$source"'
}

# s3_unit URL: the command of the systemd unit, with the variables that its file has and no others.
s3_unit() {
  printf '%s\n' "VOLUME=$1?endpoint=$AWS_ENDPOINT_URL" "MOUNTPOINT=$scratch/mnt" "OPTIONS=cache_size=64M" \
    "AWS_ACCESS_KEY_ID=$AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY=$AWS_SECRET_ACCESS_KEY" >"$scratch/unit.conf"
  FERRY_COMMAND=$ferry timeout 120 python3 - "$repo/contrib/ferry@.service" "$scratch/unit.conf" <<'PYTHON'
import os, re, socket, subprocess, sys
unit, conf = (dict(line.split("=", 1) for line in open(path).read().splitlines() if re.match("[A-Z]", line) and "=" in line)
              for path in sys.argv[1:])
expand = lambda word: re.sub(r"\$\{(\w+)\}", lambda name: conf[name[1]], word)
words = [expand(word) for word in unit["ExecStart"].split()]
words[0] = os.environ["FERRY_COMMAND"]
ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
ready.bind("\0ferry-unit-%d" % os.getpid())
mark = {"FERRY_SCRIPT": os.environ["FERRY_SCRIPT"], "NOTIFY_SOCKET": "@ferry-unit-%d" % os.getpid()}
daemon = subprocess.Popen(words, env=conf | mark, cwd="/")
assert ready.recv(100) == b"READY=1"
path = os.path.join(conf["MOUNTPOINT"], "unit")
open(path, "w").write("by a unit")
assert os.path.ismount(conf["MOUNTPOINT"])
daemon.terminate()
assert daemon.wait() == 0, daemon
assert not os.path.ismount(conf["MOUNTPOINT"])
PYTHON
  mount_volume "$1" "$scratch/mnt"
  [ "$(cat "$scratch/mnt/unit")" = "by a unit" ]
  object_clean "$1"
}

# s3_elsewhere COMMAND…: as on a machine that has never had the volume.
s3_elsewhere() {
  mkdir -p /var/lib/ferry
  unshare -m sh -c 'mount -t tmpfs none /var/lib/ferry && "$@"' elsewhere "$@"
}

# s3_local URL PROGRAM DIRECTORY: with durability=local syncs go on while the store is away. The
# daemon is killed then; everything that was synced is there, also for a mount without the option.
s3_local() {
  local options=durability=local,local_log=$scratch/local n daemon
  mkdir -p "$scratch/local"
  mount_volume "$1" "$scratch/mnt" "$options"
  mkdir "$scratch/mnt/local"
  "$ferry" sync "$scratch/mnt"
  stop_s3_store
  for n in $(seq 200); do
    echo "$n" >"$scratch/mnt/local/$n"
    timeout 20 sync "$scratch/mnt/local/$n"
  done
  [ "$(stat_of "$scratch/mnt" store waiting_objects)" -ge 100 ]
  # Unmounting says what it waits for, and leaves the mount.
  "$ferry" umount "$scratch/mnt" --timeout 2s 2>"$scratch/said" && return 1
  grep 'still mounted: after 2 s .* objects, .*, are not in its store yet' "$scratch/said"
  daemon=$(stat_of "$scratch/mnt" fuse daemon)
  kill_mount_of "$daemon"
  run_s3_store "$2" "$3"
  s3_elsewhere timeout 60 "$ferry" mount "$1" "$scratch/other" --take-over 2>"$scratch/said" && return 1
  grep -e '--take-over --force' "$scratch/said"
  # Nobody reads the volume as if nothing were missing.
  timeout 60 "$ferry" fsck "$1" 2>"$scratch/said" && return 1
  grep 'local log has .* flushes' "$scratch/said"
  mount_volume "$1" "$scratch/mnt"
  for n in $(seq 200); do [ "$(cat "$scratch/mnt/local/$n")" = "$n" ]; done
  [ ! -e "$scratch/local/ferry-local-log" ]
  object_clean "$1"
}

# s3_local_lost URL PROGRAM DIRECTORY: another machine takes the volume with --force. The first one
# then says what is lost, and goes on.
s3_local_lost() {
  local options=durability=local,local_log=$scratch/local
  mount_volume "$1" "$scratch/mnt" "$options"
  stop_s3_store
  echo lost >"$scratch/mnt/lost"
  timeout 20 sync "$scratch/mnt/lost"
  kill_mount_of "$(stat_of "$scratch/mnt" fuse daemon)"
  run_s3_store "$2" "$3"
  s3_elsewhere sh -c 'timeout 60 "$1" mount "$2" "$3" --take-over --force && timeout 60 "$1" umount "$3"' \
    take "$ferry" "$1" "$scratch/other"
  mount_volume "$1" "$scratch/mnt" "$options" 2>"$scratch/said"
  grep 'another owner took the volume over .* flushes since .* are lost; their log is left as' "$scratch/said"
  ls "$scratch"/local/ferry-local-log.lost-*
  [ ! -e "$scratch/mnt/lost" ]
  object_clean "$1"
}

# s3_outage URL PROGRAM DIRECTORY SECONDS: the store does not answer for half of the time, and is not
# there for the other half. Programs that write meanwhile hear of no error, and go on by themselves.
# What was synced is there after a kill -9 of the daemon.
s3_outage() {
  local mount=$scratch/mnt writer before memory daemon
  mount_volume "$1" "$mount" cache_size=64M
  find_s3_store
  : >"$scratch/acknowledged"
  rm -f "$scratch/outage-ends"
  python3 "$repo/scripts/suites/outage.py" write "$mount/outage" "$scratch/acknowledged" "$scratch/outage-ends" &
  writer=$!
  until [ "$(acknowledged)" -ge 100 ]; do kill -0 "$writer"; sleep 0.05; done
  kill -STOP "$s3_server"
  # What had been answered is acknowledged.
  sleep 2
  before=$(acknowledged)
  sleep $(($4 / 2))
  kill -9 "$s3_server"
  sleep $(($4 - $4 / 2))
  kill -0 "$writer"
  [ "$(acknowledged)" = "$before" ]
  daemon=$(stat_of "$mount" fuse daemon)
  memory=$(awk '$1 == "VmRSS:" { print int($2 / 1024) }' "/proc/$daemon/status")
  say "away for $4 s: $(stat_of "$mount" store held reason); the daemon has $memory MiB"
  [ "$memory" -le $((64 + 400)) ]
  run_s3_store "$2" "$3"
  until [ "$(acknowledged)" -ge $((before + 100)) ]; do kill -0 "$writer"; sleep 0.05; done
  touch "$scratch/outage-ends"
  wait "$writer"
  kill_mount_of "$daemon"
  mount_volume "$1" "$mount"
  python3 "$repo/scripts/suites/outage.py" check "$mount/outage" "$scratch/acknowledged"
  rm -r "$mount/outage"
  object_clean "$1"
}

# s3_writes_on: a program whose syncs waited for the store has heard of no error, and goes on.
s3_writes_on() {
  local before; before=$(acknowledged)
  until [ "$(acknowledged)" -ge $((before + 20)) ]; do kill -0 "$s3_writer"; sleep 0.05; done
}

# owners_on_s3_store PROGRAM: what depends on creates that are exclusive.
owners_on_s3_store() {
  check "$1 does what a volume needs" 900 tests_on_s3_store "$1"
  start_s3_store "$1" "$scratch/s3-$1"
  say "--- a volume on $1"
  object_owners "s3://ferry-test/volumes/$1"
  stop_s3_store
  forget_s3_locks
}

# The locks of a store that will not be there again.
forget_s3_locks() {
  local locks
  for locks in $(grep -lF "$AWS_ENDPOINT_URL" /var/lib/ferry/locks/*/id); do rm -r "${locks%/id}"; done
}

# volume_on_s3_store PROGRAM FSX-OPERATIONS AWAY-SECONDS: everything.
volume_on_s3_store() {
  local url=s3://ferry-test/volumes/$1
  check "$1 does what a volume needs" 900 tests_on_s3_store "$1"
  start_s3_store "$1" "$scratch/s3-$1"
  suite_object_on "$url" "$2"
  check "mount(8) and fstab" 120 s3_fstab "$url"
  check "the systemd unit's command" 200 s3_unit "$url"
  mount_volume "$url" "$scratch/mnt" "cache=$scratch/away-cache"
  mkdir "$scratch/mnt/away"
  cp -r "$repo/docs" "$scratch/mnt/away/first"
  : >"$scratch/acknowledged"
  fsync_writer "$scratch/mnt/running" "$scratch/acknowledged" &
  s3_writer=$!
  until [ "$(acknowledged)" -ge 20 ]; do sleep 0.05; done
  stop_s3_store
  rm -f "$scratch/s3-synced"
  check "the store is away" 60 s3_away "$url"
  run_s3_store "$1" "$scratch/s3-$1"
  check "programs go on when the store is back" 60 s3_writes_on
  kill "$s3_writer" || true
  wait "$s3_writer" || true
  check "the store is back" 200 s3_back "$url"
  check "the store is away for $3 s" $((300 + $3)) s3_outage "$url" "$1" "$scratch/s3-$1" "$3"
  find_s3_store
  check "durability=local, killed while the store is away" 200 s3_local "$url" "$1" "$scratch/s3-$1"
  find_s3_store
  check "durability=local, taken over by force" 200 s3_local_lost "$url" "$1" "$scratch/s3-$1"
  find_s3_store
  check "PostgreSQL, the daemon killed" 300 s3_postgres "$url"
  stop_s3_store
  forget_s3_locks
}

# suite_s3 FSX-OPERATIONS
suite_s3() {
  say "--- a store that speaks S3"
  volume_on_s3_store versitygw "$1" "${FERRY_AWAY_SECONDS:-20}"
}

# Another store; scripts/long does there what is left.
suite_minio() {
  say "--- MinIO"
  # When all parts run, it is being built since they began.
  "$repo/scripts/setup" minio
  FERRY_STOPS=${FERRY_STOPS:-1} owners_on_s3_store minio
  check "two servers take a volume from each other, 3 times" 400 servers_take_over 3
}

# servers_take_over ROUNDS: one is killed, releases the volume, or is stopped, while three clients work.
servers_take_over() {
  local code=0
  mkdir -p /var/lib/ferry
  start_s3_store minio "$scratch/s3-take-over"
  python3 "$repo/scripts/suites/takeover.py" "$ferry" "$scratch/take-over" "$1" s3://ferry-test/take-over || code=$?
  stop_s3_store
  return "$code"
}
