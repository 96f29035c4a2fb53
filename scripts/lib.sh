# Functions that the scripts share; sourced, not run. A script that sources it gets a scratch
# directory of its own, and whatever it mounts or leaves running below that directory is gone when
# it ends, however it ends.
# shellcheck shell=bash

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${CARGO_TARGET_DIR:-$repo/target}
tools=${FERRY_TOOLS:-$repo/target/tools}
# The command under test; FERRY=/path/to/ferry tries another build.
ferry=${FERRY:-$target/release/ferry}
kernel_tar_xz=/usr/src/linux-source-6.1.tar.xz

say() { printf '%s\n' "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }
now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.2f", b - a }'; }

# Seconds that a command takes, on stdout; its own output goes to stderr.
seconds() {
  local begun; begun=$(now)
  "$@" >&2 || return
  since "$begun"
}

# build_programs [OPTION…]: what users install. One by one: together they would share features, and
# the daemon would get what only benchmarks use.
build_programs() {
  [ -z "${FERRY:-}" ] || return 0
  local package
  for package in ferry-bench ferry; do
    cargo build --manifest-path "$repo/Cargo.toml" --release --package "$package" "$@"
  done
}

# Without optimization across crates and units, and without lines in backtraces, which are for what
# users install: the many programs of tests are compiled in 0.6 of the processor time. The tests
# themselves compute an eighth longer. What is built so lies beside the rest.
build_for_tests() {
  export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=4 CARGO_PROFILE_RELEASE_DEBUG=none
}

need_root() { [ "$(id -u)" = 0 ] || die "must be run by root: it mounts, changes owners and makes device nodes"; }
need_fuse() { [ -c /dev/fuse ] || die "there is no /dev/fuse here (a container needs --device /dev/fuse --cap-add SYS_ADMIN)"; }

# in_namespaces SUITE: runs scripts/suites/SUITE.py, which begins as apart.py says.
in_namespaces() {
  PYTHONDONTWRITEBYTECODE=1 unshare --mount --propagation private --pid --fork --kill-child --mount-proc --net \
    /usr/bin/python3 "$repo/scripts/suites/$1.py" "$ferry" "$scratch"
}

# Mounts below a directory, newest first, however their daemons fare.
mounts_below() {
  awk -v base="$1/" '{ gsub(/\\040/, " ", $5); if (index($5 "/", base) == 1) print $5 }' /proc/self/mountinfo | tac
}

# The process that starts another daemon if this one is killed.
holder_of() { awk '/^PPid:/ { print $2 }' "/proc/$1/status"; }

# Ends the mount of a volume as a crash of the machine does: its holder is killed, and with it the daemon.
kill_mount() { kill_mount_of "$(daemon_of "$1")"; }

# The same of the mount that a process serves.
kill_mount_of() {
  kill -9 "$(holder_of "$1")"
  timeout 60 tail --pid="$1" -f /dev/null
}

# The process that has a volume open.
daemon_of() {
  local volume; volume=$(readlink -f "$1")
  # Processes that end meanwhile are no error.
  { find /proc/[0-9]*/fd -maxdepth 1 -type l -printf '%p %l\n' 2>/dev/null || true; } |
    VOLUME=$volume awk '{ path = $1; sub(/^[^ ]* /, "") } $0 == ENVIRON["VOLUME"] { split(path, part, "/"); print part[3]; found = 1; exit }
      END { exit !found }'
}

# Processes that this script has started, however they have detached themselves since: they carry
# its mark.
marked_processes() {
  { grep -lzxF "FERRY_SCRIPT=$scratch" /proc/[0-9]*/environ 2>/dev/null || true; } | cut -d / -f 3 | grep -vxF $$ || true
}

# Process groups that a script has started beside itself; each cleans up after itself.
lanes=()

# end_after MINUTES: ends this script if it hangs, and says what runs then and how far each part got.
end_after() {
  set -m
  (
    sleep "$(($1 * 60))"
    say "FAIL  not done after $1 minutes; what runs:"
    ps -eo pid,ppid,stat,etimes,wchan:24,args | grep -v '\]$' | cut -c1-200
    tail -n 8 "$scratch"/output.* "$scratch"/*.log 2>/dev/null || true
    kill -TERM $$
    # A shell that waits for a program hears of it only behind its end.
    sleep 30
    for pid in $(marked_processes); do kill -9 "$pid" 2>/dev/null || true; done
  ) &
  deadline=$!
  set +m
}

cleanup() {
  local code=$? pid lane
  trap - EXIT INT TERM HUP
  cd /
  for lane in ${lanes[@]+"${lanes[@]}"} ${deadline:+"$deadline"}; do kill -TERM -- "-$lane" 2>/dev/null || true; done
  tidy
  for pid in $(marked_processes); do kill -9 "$pid" 2>/dev/null || true; done
  [ -n "${FERRY_KEEP:-}" ] || rm -rf --one-file-system "$scratch"
  exit "$code"
}

# Makes $scratch, on a real disk: the tree's own unless FERRY_SCRATCH says another directory.
make_scratch() {
  local base=${FERRY_SCRATCH:-$repo/target/scratch}
  mkdir -p "$base"
  # Nothing that an earlier run, killed in the middle, has left behind may pass for this one's.
  scratch=$(mktemp -d "$base/${0##*/}.XXXXXX")
  chmod 755 "$base" "$scratch"
  export FERRY_SCRIPT=$scratch
  trap cleanup EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
}

# mount_volume VOLUME MOUNTPOINT [OPTIONS]: the volume is made if absent, the directory too.
mount_volume() {
  mkdir -p "$2"
  timeout 120 "$ferry" mount "$1" "$2" --create ${3:+-o "$3"}
}
unmount_volume() { timeout 200 "$ferry" umount "$1"; }

# Bytes of file contents that a volume holds: it is synced first, so that what is being removed is
# gone.
live_bytes() { stat_of "$1" data live_bytes; }

# Asks the daemon for one figure: stat_of MOUNTPOINT JSON-POINTER-WORDS…
stat_of() {
  local mountpoint=$1; shift
  "$ferry" stats "$mountpoint" --json | python3 -c '
import functools, json, sys
print(functools.reduce(lambda value, key: value[key], sys.argv[1:], json.load(sys.stdin)))' "$@"
}

# The kernel's source tree as an uncompressed tar in the scratch directory: sets $kernel_tar.
unpack_kernel_tar() {
  kernel_tar=$scratch/linux.tar
  [ -f "$kernel_tar_xz" ] || die "$kernel_tar_xz is missing: run scripts/setup"
  xz -dc -T0 "$kernel_tar_xz" >"$kernel_tar"
}

# Puts the caches of every file system out of the way, as after a reboot.
drop_caches() { sync; echo 3 >/proc/sys/vm/drop_caches; }

# ---- counted checks
# -------------------------------------------------------------------------------------------------

passed=0
failed=0
# check NAME SECONDS COMMAND…: one check, bounded in time; its output is shown only if it fails.
# FERRY_ONLY=REGEX runs only those it matches. COMMAND may be a function, which runs under `set -e`:
# so never call a check, or what calls checks, where bash ignores that (after if, in && or ||).
check() {
  local name=$1 limit=$2 begun log code; shift 2
  [[ $name =~ ${FERRY_ONLY:-} ]] || return 0
  begun=$(now); log=$scratch/check.log
  set +e
  bounded "$limit" "$@" >"$log" 2>&1
  code=$?
  set -e
  if [ "$code" = 0 ]; then
    passed=$((passed + 1)); printf 'ok    %-58s %7s s\n' "$name" "$(since "$begun")"
  else
    failed=$((failed + 1)); printf 'FAIL  %-58s %7s s  (exit %s)\n' "$name" "$(since "$begun")" "$code"
    tail -n "${FERRY_LOG_LINES:-40}" "$log" | sed 's/^/      | /'
    tidy
  fi
}

# A check that failed may have left its mount; the next one starts afresh.
tidy() {
  local mount
  for mount in $(mounts_below "$scratch"); do
    timeout -k 5 60 "$ferry" umount --force "$mount" >/dev/null 2>&1 || umount -l "$mount" 2>/dev/null || true
  done
}

# Runs a command or function for at most so many seconds, in a process group of its own.
bounded() {
  local limit=$1 body watcher code; shift
  set -m
  (set -euo pipefail; "$@") &
  body=$!
  (sleep "$limit"; echo "not done after $limit s: killed"; kill -9 -- "-$body") &
  watcher=$!
  set +m
  wait "$body"
  code=$?
  kill -- "-$watcher" 2>/dev/null
  wait "$watcher" 2>/dev/null
  return "$code"
}

# ignored_test NAME VARIABLE=VALUE…: a test of a library that runs only if somebody asks for it.
# `--workspace` keeps cargo from building everything with another set of features.
ignored_test() {
  local name=$1 log=$scratch/ignored-test.log; shift
  if env "$@" cargo test --release --workspace --lib "$name" -- --ignored --nocapture >"$log" 2>&1 &&
    grep -qa '^test result: ok. 1 passed' "$log"; then
    return
  fi
  tail -n 60 "$log" | cut -c1-400
  return 1
}

# power_loss SECONDS: crashes below a mount for so long.
power_loss() {
  FERRY=$ferry "$repo/scripts/power-loss" \
    --minutes "$(awk -v s="$1" 'BEGIN { print s / 60 }')" ${FERRY_SEED:+--seed "$FERRY_SEED"}
}

# Adds what another counter has found.
add_results() { passed=$((passed + $1)); failed=$((failed + $2)); }

# Sets $processor_seconds: what this shell and the children that it waited for have used so far. A
# daemon is no such child.
read_processor() {
  times >"$scratch/times"
  processor_seconds=$(awk '{ for (i = 1; i <= 2; i++) { split($i, t, /[ms]/); sum += t[1] * 60 + t[2] } } END { printf "%.0f", sum }' "$scratch/times")
}
# Lines "PART SECONDS PROCESSOR PASSED FAILED" of the table at the end.
part_rows=() processor_before=0
# end_part PART BEGIN PASSED FAILED: notes a part for the table; BEGIN is what `now` said.
end_part() {
  local seconds; seconds=$(since "$2")
  read_processor
  say "      part $1: $seconds s, $((processor_seconds - processor_before)) s of a processor"
  part_rows+=("$1 $seconds $((processor_seconds - processor_before)) $3 $4")
  processor_before=$processor_seconds
}
# show_parts SECONDS: the table; the parts side by side take less time than their sum.
show_parts() {
  say ""
  read_processor
  printf '%-12s %9s %9s %7s %7s\n' part seconds processor passed failed
  # shellcheck disable=SC2046
  printf '%-12s %9s %9s %7s %7s\n' $(printf '%s\n' "${part_rows[@]}") "all" "$1" "$processor_seconds" "$passed" "$failed"
}

finish() {
  say ""
  say "$passed passed, $failed failed"
  [ "$failed" = 0 ]
}
