# Programs that people run, on a mount; sourced by scripts/test and scripts/real-programs. Each
# function is one check; it works in a directory of its own on the volume that is mounted at
# $scratch/mnt.
# shellcheck shell=bash

# A tree with everything that an archive can hold.
make_rich_tree() {
  local dir=$1
  mkdir -p "$dir/sub/deep"
  echo contents >"$dir/file"
  head -c 300000 /dev/urandom >"$dir/sub/random"
  : >"$dir/empty"
  ln "$dir/file" "$dir/sub/hard link"
  ln -s ../file "$dir/sub/symbolic"
  ln -s "$(printf 'x%.0s' {1..200})" "$dir/long"
  truncate -s 5M "$dir/sparse"
  printf end >>"$dir/sparse"
  mkfifo "$dir/fifo"
  mknod "$dir/device" c 1 3
  touch "$dir/before the epoch" "$dir/far away"
  install -m 4751 -o daemon -g nogroup /bin/true "$dir/setuid"
  mkdir -m 3775 "$dir/sticky"
  echo name >"$dir/$(printf 'n%.0s' {1..255})"
  setfattr -n user.comment -v 'an attribute' "$dir/file"
  setfattr -n trusted.binary -v 0x000102ff "$dir/sub"
  setfattr -n user.big -v "$(head -c 3000 /dev/zero | tr '\0' b)" "$dir/sub/random"
  setfacl -m u:daemon:rw,g:nogroup:r "$dir/file"
  setfacl -d -m u:daemon:rwx "$dir/sub"
  echo inherited >"$dir/sub/deep/file"
  # In the past, to the nanosecond: rsync would take a directory made in the same second for one
  # that has the right time.
  find "$dir" -depth -exec touch -h -d '2020-02-02 02:02:02.123456789 UTC' {} +
  touch -d '1969-12-31 23:59:58 UTC' "$dir/before the epoch"
  touch -d '2200-01-01 00:00:00.000000001 UTC' "$dir/far away"
}

# Everything that stat, getfattr, getfacl and the contents say, with names relative to the tree.
describe() {
  (
    cd "$1"
    find . -printf '%p %y %m %U %G %s %T@ %l\n' | sed 's/^\(\S* d [^ ]* [^ ]* [^ ]*\) [^ ]*/\1/' | sort
    find . -type f -links +1 -printf '%p %n\n' | sort
    find . -type f -print0 | sort -z | xargs -0 md5sum
    find . -print0 | sort -z | xargs -0 getfattr -h -d -m '^(user|trusted)\.' -e hex --
    find . ! -type l -print0 | sort -z | xargs -0 getfacl -n --
  )
}

program_archive() {
  local dir=$scratch/mnt/archive
  rm -rf "$dir" "$scratch/rich"; mkdir -p "$dir" "$scratch/rich"
  make_rich_tree "$dir/made"
  make_rich_tree "$scratch/rich/made"
  describe "$dir/made" >"$scratch/made.txt"
  tar -C "$dir" --xattrs --xattrs-include='*' --acls -cf "$scratch/rich.tar" made
  mkdir "$dir/tar"; tar -C "$dir/tar" --xattrs --xattrs-include='*' --acls -xpf "$scratch/rich.tar"
  describe "$dir/tar/made" | diff "$scratch/made.txt" -
  tar -C "$dir/tar" -df "$scratch/rich.tar"
  cp -a "$dir/made" "$dir/copy"
  describe "$dir/copy" | diff "$scratch/made.txt" -
  mkdir "$dir/rsync"; rsync -aHAX "$dir/made/" "$dir/rsync/"
  describe "$dir/rsync" | diff "$scratch/made.txt" -
  [ -z "$(rsync -aHAXn --checksum --itemize-changes "$dir/made/" "$dir/rsync/")" ]
  # As the host's own file system says it; only the random bytes are others.
  diff <(describe "$scratch/rich/made" | grep -v '  ./sub/random$') <(grep -v '  ./sub/random$' "$scratch/made.txt")
}

program_find_du() {
  local dir=$scratch/mnt/find
  mkdir -p "$dir"; cp -a "$repo/crates" "$dir/"
  diff <(cd "$repo" && find crates | sort) <(cd "$dir" && find crates | sort)
  [ "$(cd "$repo" && find crates -type f -printf '%s\n' | awk '{ n += $1 } END { print n }')" = \
    "$(cd "$dir" && find crates -type f -printf '%s\n' | awk '{ n += $1 } END { print n }')" ]
  dd if=/dev/zero of="$dir/big" bs=1M count=20 status=none conv=fsync
  local kib; kib=$(du -k "$dir/big" | cut -f 1)
  [ "$kib" -ge 20480 ] && [ "$kib" -le 20992 ]
  truncate -s 1G "$dir/hole"
  [ "$(du -k "$dir/hole" | cut -f 1)" = 0 ]
}

# program_git SOURCE: the clone goes through a pack, not through hard links.
program_git() {
  local dir=$scratch/mnt/git
  rm -rf "$dir"
  git clone -q --no-local "$1" "$dir"
  git -C "$dir" fsck --full --strict --no-progress
  git -C "$dir" -c gc.auto=0 gc --quiet --prune=now
  git -C "$dir" fsck --full --no-progress
  [ -z "$(git -C "$dir" status --porcelain)" ]
  [ "$(git -C "$dir" rev-parse HEAD)" = "$(git -C "$1" rev-parse HEAD)" ]
  git -C "$dir" checkout -q --detach HEAD~1 2>/dev/null || true
  git -C "$dir" checkout -q --force "$(git -C "$1" rev-parse HEAD)"
  [ -z "$(git -C "$dir" status --porcelain)" ]
}

# program_sqlite ROWS: in both journal modes, and killed in the middle of a transaction.
program_sqlite() {
  local mode db
  for mode in delete wal; do
    db=$scratch/mnt/sqlite.$mode
    { echo "pragma journal_mode=$mode; create table t(id integer primary key, x blob);"
      for _ in 1 2 3 4 5; do
        echo "begin; with recursive n(i) as (select 1 union all select i + 1 from n where i < $1) insert into t(x) select randomblob(200) from n; commit;"
      done
      echo "create index i on t(x); delete from t where id % 3 = 0; vacuum; select count(*) from t;"
    } | sqlite3 -bail "$db"
    { echo 'begin;'; while :; do echo 'insert into t(x) values (randomblob(1000));'; done; } | sqlite3 "$db" &
    local writing=$!
    # The transaction has outgrown the cache, so a part of it is on the volume.
    until [ -s "$db-journal" ] || [ -s "$db-wal" ]; do sleep 0.02; done
    kill -9 "$writing"
    wait "$writing" || true
    [ "$(sqlite3 "$db" 'pragma integrity_check')" = ok ]
    [ "$(sqlite3 "$db" 'select count(*) from t')" = $(($1 * 5 - $1 * 5 / 3)) ]
  done
}

# Stores through a shared mapping are seen by read(2), survive msync and a remount.
program_mmap() {
  python3 - "$scratch/mnt/mapped" write <<'PY'
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_TRUNC)
os.ftruncate(fd, 8 << 20)
with mmap.mmap(fd, 8 << 20) as m:
    for at in range(0, 8 << 20, 4096):
        m[at:at + 8] = at.to_bytes(8, "little")
    m.flush()
    assert all(os.pread(fd, 8, at) == at.to_bytes(8, "little") for at in range(0, 8 << 20, 4096))
    os.pwrite(fd, b"by write", 12345)
    assert m[12345:12353] == b"by write"
PY
  unmount_volume "$scratch/mnt"
  mount_volume "$scratch/programs.ferry" "$scratch/mnt"
  python3 - "$scratch/mnt/mapped" <<'PY'
import sys
data = open(sys.argv[1], "rb").read()
assert len(data) == 8 << 20
assert data[12345:12353] == b"by write"
assert all(data[at:at + 8] == at.to_bytes(8, "little") for at in range(0, 8 << 20, 4096) if at != 12288)
PY
}

# Signals that a program handles do not end its fsync, as on any local file system: databases do not
# expect EINTR from it.
program_signals() {
  perl -MTime::HiRes=setitimer,ITIMER_REAL,time -MIO::Handle -e '
    my ($seen, $synced, $end) = (0, 0, time + 5);
    $SIG{ALRM} = sub { $seen++ };
    setitimer(ITIMER_REAL, 0.001, 0.001);
    open my $file, ">", $ARGV[0] or die;
    while (time < $end) {
      syswrite($file, "x" x 100) // ($!{EINTR} ? next : die "write: $!");
      $file->sync or die "fsync after $synced: $!";
      $synced++;
    }
    setitimer(ITIMER_REAL, 0);
    print "$synced fsyncs, $seen signals\n";
    $seen > 100 && $synced > 100 or die' "$scratch/mnt/signals"
}

# program_build: this project itself, its target directory inside the mount too.
program_build() {
  local dir=$scratch/mnt/build
  git clone -q --no-local "$repo" "$dir"
  CARGO_TARGET_DIR=$dir/target cargo build --manifest-path "$dir/Cargo.toml" --quiet --package ferry
  "$dir/target/debug/ferry" --version
}

postgres() { setpriv --reuid postgres --regid postgres --clear-groups -- env HOME=/var/lib/postgresql PGHOST="$scratch/pg" "$@"; }

# program_postgres SECONDS: pgbench, kill -9 of every server process in the middle of it, recovery,
# and the books balance.
program_postgres() {
  local bin data=$scratch/mnt/postgres
  bin=$(ls -d /usr/lib/postgresql/*/bin | sort -V | tail -n 1)
  install -d -o postgres -g postgres "$scratch/pg"; install -d -m 700 -o postgres -g postgres "$data"
  start() { postgres "$bin/pg_ctl" -s -w -D "$data" -l "$scratch/pg/log" -o "-k $scratch/pg -c listen_addresses=''" start; }
  postgres "$bin/initdb" -D "$data" --no-instructions >/dev/null
  start
  postgres "$bin/pgbench" -q -i -s 10 postgres
  postgres "$bin/pgbench" -c 4 -j 2 -T "$1" postgres
  local history; history=$(postgres "$bin/psql" -XAt postgres -c 'select count(*) from pgbench_history')
  # -n: otherwise pgbench empties the history first, which then tells of this run alone.
  postgres "$bin/pgbench" -n -c 4 -j 2 -T 30 postgres >"$scratch/pg/bench" 2>&1 &
  local bench=$!
  # The kill comes in the middle of its work.
  until [ "$(postgres "$bin/psql" -XAt postgres -c 'select count(*) from pgbench_history')" -gt $((history + 500)) ]; do
    sleep 0.1
  done
  # The children first lose their parent; each is killed by its own number.
  local server; server=$(head -n 1 "$data/postmaster.pid")
  kill -9 "$server" $(pgrep -P "$server")
  wait "$bench" || true
  # The dead server may be a zombie still, which counts as alive for its lock files.
  rm -f "$data/postmaster.pid" "$scratch"/pg/.s.PGSQL.*
  start
  local sums
  sums=$(postgres "$bin/psql" -XAt postgres -c "select sum(abalance) from pgbench_accounts union all select sum(tbalance) from pgbench_tellers
    union all select sum(bbalance) from pgbench_branches union all select sum(delta) from pgbench_history" | tr '\n' ' ')
  say "sums of accounts, tellers, branches, history: $sums"
  [ "$(tr ' ' '\n' <<<"$sums" | grep . | uniq -c | awk '{ print $1 }')" = 4 ]
  postgres "$bin/pg_amcheck" --all --heapallindexed --install-missing 2>/dev/null || postgres "$bin/pg_dump" postgres >/dev/null
  postgres "$bin/pg_ctl" -s -w -D "$data" -m fast stop
  grep -E 'PANIC|checksum' "$scratch/pg/log" && return 1
  return 0
}

# The tree of the Linux kernel: unpacks, is equal, survives a remount, and leaves nothing behind.
program_kernel_tree() {
  local live
  unmount_volume "$scratch/mnt"
  rm -f "$scratch/kernel.ferry"
  mount_volume "$scratch/kernel.ferry" "$scratch/mnt"
  live=$(live_bytes "$scratch/mnt")
  tar -xf "$kernel_tar" -C "$scratch/mnt"
  "$ferry" sync "$scratch/mnt"
  tar -df "$kernel_tar" -C "$scratch/mnt"
  unmount_volume "$scratch/mnt"
  timeout 300 "$ferry" fsck "$scratch/kernel.ferry"
  mount_volume "$scratch/kernel.ferry" "$scratch/mnt"
  tar -df "$kernel_tar" -C "$scratch/mnt"
  rm -r "$scratch/mnt"/linux-source-*
  "$ferry" sync "$scratch/mnt"
  say "live bytes: $live when fresh, $(live_bytes "$scratch/mnt") now"
  [ "$(live_bytes "$scratch/mnt")" = "$live" ]
  unmount_volume "$scratch/mnt"
  timeout 300 "$ferry" fsck "$scratch/kernel.ferry"
  # The file on the host has shrunk: the home store and the log are what is left.
  local kib; kib=$(du -k "$scratch/kernel.ferry" | cut -f 1)
  say "the volume takes $kib KiB of the host"
  [ "$kib" -lt 600000 ]
  mount_volume "$scratch/programs.ferry" "$scratch/mnt"
}

# A large repository to clone, made from the kernel's tree beside the volume.
make_kernel_repository() {
  mkdir -p "$scratch/kernel-git"
  tar -xf "$kernel_tar" -C "$scratch/kernel-git" --strip-components=1
  git -C "$scratch/kernel-git" init -q
  git -C "$scratch/kernel-git" add --all --force # Debian's tree ignores everything but its own directory
  git -C "$scratch/kernel-git" -c user.name=test -c user.email=test@example.org commit -q -m tree
}

# A check that fails ends with its mount, and the next one begins with one.
mount_for_programs() {
  mountpoint -q "$scratch/mnt" || mount_volume "$scratch/programs.ferry" "$scratch/mnt" allow_other
}
# check_program NAME SECONDS FUNCTION ARGUMENTS…
check_program() {
  local name=$1 limit=$2; shift 2
  check "$name" "$limit" with_mount "$@"
}
with_mount() { mount_for_programs; "$@"; }

suite_programs_quick() {
  say "--- programs"
  check_program "tar, cp -a, rsync with xattrs, ACLs, devices, holes" 120 program_archive
  check_program "find and du" 60 program_find_du
  check_program "git clone, fsck, gc" 120 program_git "$repo"
  check_program "sqlite3, killed and recovered" 120 program_sqlite 4000
  check_program "mmap" 60 program_mmap
  check_program "fsync under a rain of signals" 60 program_signals
  check_program "unmount and fsck after the programs" 120 unmount_and_check programs
}

suite_programs_full() {
  say "--- programs, in full"
  unpack_kernel_tar
  check_program "tar, cp -a, rsync with xattrs, ACLs, devices, holes" 120 program_archive
  check_program "find and du" 60 program_find_du
  check_program "the kernel's tree, twice mounted, then removed" 900 program_kernel_tree
  check "making a repository of the kernel's tree (on the host)" 600 make_kernel_repository
  check_program "git clone --no-local, fsck, gc of the kernel's tree" 900 program_git "$scratch/kernel-git"
  check_program "cargo build of this project" 900 program_build
  check_program "sqlite3, killed and recovered" 300 program_sqlite 40000
  check_program "PostgreSQL: pgbench, kill -9, recovery" 400 program_postgres 60
  check_program "mmap" 60 program_mmap
  check_program "fsync under a rain of signals" 60 program_signals
  check_program "unmount and fsck after the programs" 300 unmount_and_check programs
}
