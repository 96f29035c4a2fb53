# pjdfstest and fsx on a mount; sourced by scripts/test.
# shellcheck shell=bash

# Tests that cannot apply to any FUSE file system, each with the reason.
#   link::link_count_max: it asks pathconf(_PC_LINK_MAX), which glibc answers from a list of file
#   systems that FUSE is not on.
pjdfstest_not_applicable='^link::link_count_max$'

# Runs pjdfstest with the arguments; its verdicts go to $scratch/pjdfstest.log, and are added up.
pjdfstest_run() {
  local log=$scratch/pjdfstest.log counts failed_here passed_here
  PATH=$scratch/bin:$PATH timeout -k 5 300 "$tools/bin/pjdfstest" -p "$scratch/mnt" -s "$scratch/other" "$@" >"$log" 2>&1 || true
  counts=$(sed 's/\x1b\[[0-9;]*m//g' "$log" | sed -n 's/^Summary: \([0-9]*\) failed, [0-9]* skipped, \([0-9]*\) passed.*/\1 \2/p')
  if [ -z "$counts" ]; then
    say "FAIL  pjdfstest ended without a summary"; tail -n 20 "$log"; add_results 0 1; return
  fi
  read -r failed_here passed_here <<<"$counts"
  sed 's/\x1b\[[0-9;]*m//g' "$log" | grep -A 2 ' FAILED$' || true
  add_results "$passed_here" "$failed_here"
  say "      $passed_here passed, $failed_here failed"
}

suite_pjdfstest() {
  say "--- pjdfstest, as root"
  mount_volume "$scratch/posix.ferry" "$scratch/mnt"
  mkdir -p "$scratch/other" "$scratch/bin"
  # The EROFS tests call mount(8) to remount; -i spares them the mount helper, which may not be
  # installed here.
  printf '#!/bin/sh\nexec %s -i "$@"\n' "$(command -v mount)" >"$scratch/bin/mount"
  chmod 755 "$scratch/bin/mount"
  sed 's/^allow_remount = .*/allow_remount = false/' "$repo/scripts/suites/pjdfstest.toml" >"$scratch/no-remount.toml"
  pjdfstest_run -c "$scratch/no-remount.toml"
  local unexpected
  unexpected=$(sed 's/\x1b\[[0-9;]*m//g' "$scratch/pjdfstest.log" | awk '$2 == "skipped" { print $1 }' | grep -v '::erofs' | grep -vE "$pjdfstest_not_applicable" || true)
  if [ -n "$unexpected" ]; then say "FAIL  skipped without a known reason: $unexpected"; add_results 0 1; fi
  # On their own: descriptors that other tests leave open in the same process would keep any file
  # system from the remount.
  pjdfstest_run -c "$repo/scripts/suites/pjdfstest.toml" erofs
  check "unmount and fsck after pjdfstest" 120 unmount_and_check posix
}

# fsx_in MODE OPERATIONS SEED: on a volume of its own, which is clean afterwards.
fsx_in() {
  local mount=$scratch/fsx-$1 volume=$scratch/fsx-$1.ferry left=$2 piece
  mkdir -p "$scratch/artifacts-$1"
  mount_volume "$volume" "$mount" "cache=$1,cache_size=64M"
  # It keeps every mapping that it has made, and each further one costs more: in pieces, of a file
  # each.
  for ((piece = 0; left > 0; piece++, left -= 20000)); do
    "$tools/bin/fsx" -f "$repo/scripts/suites/fsx.toml" -N "$((left < 20000 ? left : 20000))" -S "$(($3 + piece))" \
      -P "$scratch/artifacts-$1" "$mount/fsx$piece" || return
  done
  unmount_volume "$mount"
  timeout 100 "$ferry" fsck "$volume"
}

# fsx_verdict MODE: what the run in that mode came to; it has ended, and left its status.
fsx_verdict() {
  cat "$scratch/fsx-$1.log"
  [ "$(cat "$scratch/fsx-$1.status")" = 0 ]
}

# suite_fsx OPERATIONS: in each cache mode, side by side: one run keeps less than one core busy.
suite_fsx() {
  local mode pids='' seed=${FERRY_SEED:-$RANDOM}
  say "--- fsx, $1 operations in each cache mode, then unmount and fsck; seed $seed"
  for mode in kernel writeback strict; do
    # `bounded` says how it ended, also where it was killed.
    (set +e; bounded 1500 fsx_in "$mode" "$1" "$seed" >"$scratch/fsx-$mode.log" 2>&1; echo $? >"$scratch/fsx-$mode.status") &
    pids+=" $!"
  done
  # shellcheck disable=SC2086
  wait $pids
  for mode in kernel writeback strict; do check "fsx cache=$mode" 60 fsx_verdict "$mode"; done
}

# unmount_and_check NAME: the volume $scratch/NAME.ferry is clean once unmounted.
unmount_and_check() {
  unmount_volume "$scratch/mnt"
  timeout 100 "$ferry" fsck "$scratch/$1.ferry"
}
