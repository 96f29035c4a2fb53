# Three clients on slow, late and cut links, a server and a client that are killed; every byte and
# every answer is checked; sourced by scripts/test, scripts/long and scripts/check-remote.
# shellcheck shell=bash

# suite_checker SECONDS
suite_checker() {
  local seed=${FERRY_SEED:-$RANDOM} relay=${ferry%/*}/examples/relay
  say "--- three clients behind faulty links, $1 s; seed $seed"
  if ! [ -x "$relay" ]; then
    relay=$target/release/examples/relay
    cargo build --release --quiet --package ferry-bench --example relay
  fi
  check "nothing acknowledged is lost behind faulty links" "$(($1 + 500))" \
    python3 "$repo/scripts/suites/checker.py" "$1" "$seed" "$ferry" "$relay" "$scratch/checker"
}
