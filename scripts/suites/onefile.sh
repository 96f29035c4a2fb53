# Many readers and writers on one file, through mounts, and what that takes of memory; sourced by
# scripts/test.
# shellcheck shell=bash

one_file() { python3 "$repo/scripts/suites/onefile.py" "$@"; }

# asynchronous DIRECTORY SECONDS: asynchronous direct writes of a file that others read.
asynchronous() { timeout 50 python3 "$repo/scripts/suites/asynchronous.py" "$@"; }

# one_file_on MODE COMMAND…: on a new volume, mounted with cache=MODE; clean afterwards.
one_file_on() {
  local mode=$1; shift
  rm -f "$scratch/onefile.ferry"
  mount_volume "$scratch/onefile.ferry" "$scratch/mnt" "cache=$mode,cache_size=64M"
  "$@"
  unmount_volume "$scratch/mnt"
  timeout 100 "$ferry" fsck "$scratch/onefile.ferry"
}

torn_reads() { timeout 100 "$ferry" bench torn --on "$scratch/mnt" --time "$1"; }

# The kernel's memory of the daemon in MiB, at most so far.
daemon_peak_mib() { awk '/^VmHWM/ { printf "%d", $2 / 1024 }' "/proc/$(daemon_of "$scratch/onefile.ferry")/status"; }

# stays_small MIB WHAT SECONDS: the daemon's memory stays below.
stays_small() {
  local peak
  one_file "$2" "$scratch/mnt" "$3"
  "$ferry" sync "$scratch/mnt"
  peak=$(daemon_peak_mib)
  say "$2: at most $peak MiB of memory"
  [ "$peak" -le "$1" ]
}

# suite_onefile SECONDS: of the memory's check on a sparse file.
suite_onefile() {
  local mode
  say "--- one file"
  check "no read is torn, cache=strict" 120 one_file_on strict torn_reads 5s
  for mode in strict kernel writeback; do
    check "appends of any length by processes, cache=$mode" 120 one_file_on "$mode" one_file append "$scratch/mnt" 3
    check "direct I/O, mmap and plain I/O agree, cache=$mode" 120 one_file_on "$mode" one_file coherent "$scratch/mnt" 2
    check "writes beside stores lose nothing, cache=$mode" 120 one_file_on "$mode" beside "$scratch/mnt" 9
  done
  for mode in strict kernel writeback; do
    check "asynchronous direct writes are read at once, cache=$mode" 60 one_file_on "$mode" asynchronous "$scratch/mnt" 4
    check "attributes beside changes by others, cache=$mode" 60 one_file_on "$mode" attributes local "$scratch/mnt"
    check "an overlay has its upper directory here, cache=$mode" 60 one_file_on "$mode" overlay "$scratch/mnt"
  done
  # cache_size and 300 MiB: buffers under way, the log's contexts, inodes that the kernel knows, and
  # the daemon itself.
  check "a sparse file stays inside cache_size" $(($1 + 200)) one_file_on strict stays_small 364 sparse "$1"
  check "many small files stay inside cache_size" 200 one_file_on kernel stays_small 364 small 0
}
