# stress-ng's file-system stressors; sourced by scripts/test.
# shellcheck shell=bash

stressors=(access chdir chmod chown copy-file dentry dir dirdeep dirmany fallocate fcntl filename flock fpunch fsize fstat getdent
  handle hdd iomix lease link locka lockf lockofd mknod open readahead rename revio seek sendfile symlink sync-file touch utime xattr)

# run_stressors SECONDS: one of each at once.
run_stressors() {
  local args=() stressor
  for stressor in "${stressors[@]}"; do args+=("--$stressor" 1); done
  mkdir -p "$scratch/mnt/stress"
  stress-ng --temp-path "$scratch/mnt/stress" --timeout "$1s" --verify --oomable \
    --hdd-bytes 64m --fallocate-bytes 64m --iomix-bytes 64m --copy-file-bytes 128m --readahead-bytes 128m --seek-size 32m \
    "${args[@]}" >"$scratch/stress.log" 2>&1 || { cat "$scratch/stress.log"; return 1; }
  if grep -E 'stress-ng: (fail|error):' "$scratch/stress.log"; then return 1; fi
}

# Nobody of ours still runs in the kernel without an end, or is left over at all.
no_process_is_stuck() {
  local attempt
  for attempt in $(seq 50); do
    local left=() pid
    for pid in $(marked_processes); do
      if grep -q '^stress-ng' "/proc/$pid/comm" 2>/dev/null; then left+=("$pid"); fi
    done
    [ ${#left[@]} -gt 0 ] || return 0
    say "look $attempt: ${left[*]}"; sleep 0.2
  done
  return 1
}

# The space of removed files is free again within 30 s: large ones are reclaimed in the background.
# No descriptor of the daemon is left open. Figures from before the stress: $1 bytes, $2
# descriptors.
nothing_leaked() {
  local attempt live descriptors
  rm -rf "$scratch/mnt/stress"
  for attempt in $(seq 60); do
    "$ferry" sync "$scratch/mnt"
    live=$(live_bytes "$scratch/mnt"); descriptors=$(open_descriptors)
    say "look $attempt: live bytes $1 -> $live, descriptors $2 -> $descriptors"
    if [ "$live" -le "$1" ] && [ "$descriptors" -le "$2" ]; then return 0; fi
    sleep 0.5
  done
  return 1
}

open_descriptors() { find "/proc/$(daemon_of "$scratch/stress.ferry")/fd" -mindepth 1 | wc -l; }

# mount_goes_on SECONDS [PAUSE [VOLUME]]: other processes go on with a mount while programs work there. VOLUME
# may be `killed`: then the daemon is killed. `killed-in-store`: that of a volume in a directory of objects.
mount_goes_on() {
  local directory; directory=$(mktemp -d "$scratch/go-on.XXXXXX")
  # PostgreSQL has a user of its own.
  chmod 755 "$directory"
  case ${3:-} in
    killed-in-store) set -- "$1" "$2" killed "dir://$directory/store" ;;
  esac
  python3 "$repo/scripts/suites/go_on.py" "$ferry" "$directory" "$1" "${2:-0.5}" "${@:3}"
}

# suite_stress SECONDS
suite_stress() {
  local live descriptors
  say "--- stress-ng, ${#stressors[@]} file-system stressors at once for $1 s"
  mount_volume "$scratch/stress.ferry" "$scratch/mnt" "cache_size=128M"
  live=$(live_bytes "$scratch/mnt"); descriptors=$(open_descriptors)
  check "stress-ng for $1 s" $(($1 + 180)) run_stressors "$1"
  check "no process is stuck" 30 no_process_is_stuck
  check "nothing leaked" 120 nothing_leaked "$live" "$descriptors"
  check "unmount and fsck after stress-ng" 120 unmount_and_check stress
  check "fio, git, sqlite3 and make while the mount goes on in other processes, $(($1 / 4)) s" $(($1 + 120)) mount_goes_on $(($1 / 4))
  check "the same of a mount of a server" $(($1 + 120)) mount_goes_on $(($1 / 4)) 0.5 served
  check "the same of a mount whose daemon is killed" $(($1 + 120)) mount_goes_on $(($1 / 4)) 1 killed
  check "the same of a volume in a store" $(($1 + 120)) mount_goes_on $(($1 / 4)) 1 killed-in-store
}
