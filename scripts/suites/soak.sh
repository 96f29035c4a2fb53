# Load without a pause, and the daemon killed again and again; sourced by scripts/test and
# scripts/soak.
# shellcheck shell=bash

# Stressors beside the processes that log acknowledgements: everything that changes names,
# attributes and space.
soak_stressors=(chmod dentry dir dirdeep fallocate fpunch link rename symlink xattr)

# soak_writers ROUND: eight processes, each with a log of its own of what was acknowledged to it.
soak_writers() {
  local n
  for n in 1 2 3 4 5 6 7 8; do
    mkdir -p "$scratch/mnt/round$1/p$n"
    "$ack" run "$scratch/mnt/round$1/p$n" "$scratch/soak.$1.$n.log" --threads 1 --seconds 600 --seed "$((seed + 8 * $1 + n))" &
  done
}

soak_noise() {
  local args=() stressor
  for stressor in "${soak_stressors[@]}"; do args+=("--$stressor" 1); done
  mkdir -p "$scratch/mnt/noise"
  # It ends with errors when the daemon dies, as it must.
  stress-ng --temp-path "$scratch/mnt/noise" --timeout 600s --fallocate-bytes 64m --quiet "${args[@]}" >/dev/null 2>&1 &
}

# soak_verify ROUND: all that was acknowledged in it is there.
soak_verify() {
  local n
  for n in 1 2 3 4 5 6 7 8; do "$ack" verify "$scratch/mnt/round$1/p$n" "$scratch/soak.$1.$n.log" >>"$scratch/soak.verified"; done
}

# soak_round ROUND SECONDS: works for so long, is killed; the volume is checked as it is, recovered,
# compared.
soak_round() {
  local n lines
  mount_volume "$scratch/soak.ferry" "$scratch/mnt" "cache_size=256M"
  # The files of earlier rounds have been verified twice. Their space is needed, and their removal
  # is load too.
  if [ "$1" -gt 3 ]; then rm -rf "$scratch/mnt/round$(($1 - 3))" "$scratch/soak.$(($1 - 3))".*.log & fi
  rm -rf "$scratch/mnt/noise"
  soak_writers "$1"
  soak_noise
  sleep "$2"
  kill_mount "$scratch/soak.ferry"
  # A dead mount fails all requests. stress-ng goes on all the same, so it is killed.
  for n in $(marked_processes); do
    if grep -q '^stress-ng' "/proc/$n/comm" 2>/dev/null; then kill -9 "$n" 2>/dev/null || true; fi
  done
  wait
  timeout 120 "$ferry" fsck "$scratch/soak.ferry"
  mount_volume "$scratch/soak.ferry" "$scratch/mnt" "cache_size=256M"
  soak_verify "$1"
  if [ "$1" -gt 1 ]; then soak_verify $(($1 - 1)); fi
  unmount_volume "$scratch/mnt"
  timeout 120 "$ferry" fsck "$scratch/soak.ferry"
  lines=$(grep -h '^done' "$scratch"/soak."$1".*.log | wc -l)
  say "round $1: killed after $2 s, $lines changes were acknowledged"
  [ "$lines" -gt 100 ]
  echo "$lines" >>"$scratch/soak.acknowledged"
}

# suite_soak SECONDS: rounds of 20 to 40 s of load until the time is up.
suite_soak() {
  local round=0 length end before=$failed seed=${FERRY_SEED:-$RANDOM}
  RANDOM=$seed
  say "--- soak, $1 s: eight processes, kill -9 every 20 to 40 s; seed $seed"
  end=$(($(date +%s) + $1))
  while [ "$(date +%s)" -lt "$end" ]; do
    round=$((round + 1)); length=$((20 + RANDOM % 21))
    check "kill -9 in round $round, after $length s" $((length + 400)) soak_round "$round" "$length"
    [ "$failed" = "$before" ] || return 0
  done
  say "      $round kills, $(awk '{ n += $1 } END { print n + 0 }' "$scratch/soak.acknowledged") acknowledged changes, $(awk '{ n += $1 } END { print n + 0 }' "$scratch/soak.verified") files compared"
}
