# Figures, their medians and the table, for the scripts that measure; sourced after lib.sh. Wants
# $rounds.
# shellcheck shell=bash

# Figures are kept as lines "NAME VALUE"; every value counts, the table shows medians.
note() { printf '%s %s\n' "$1" "$2" | tee -a "$scratch/figures" >&2; }
# measure NAME COMMAND…: its seconds.
measure() {
  local name=$1 time; shift
  time=$(seconds "$@")
  note "$name" "$time"
}
median() { awk -v n="$1" '$1 == n { print $2 }' "$scratch/figures" | sort -n | awk '{ v[NR] = $1 } END { if (NR) print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2; else print "-" }'; }
values() { awk -v n="$1" '$1 == n { printf "%s%s", s, $2; s = " " }' "$scratch/figures"; }

# XFS on a loop device on the same disk, at $scratch/xfs.
xfs_up() {
  # Every block is written, so that the loop device's file need not be extended while it is
  # measured.
  head -c 8G /dev/zero >"$scratch/xfs.img"
  sync "$scratch/xfs.img"
  mkfs.xfs -q -f "$scratch/xfs.img"
  mount -o loop "$scratch/xfs.img" "$scratch/xfs"
}

table_begins() {
  say ""
  say "$(uname -r), $(nproc) cores, $(awk '/MemTotal/ { printf "%d GiB", $2 / 1048576 }' /proc/meminfo), $(date -u +%F), $(git -C "$repo" rev-parse --short HEAD), median of $rounds"
  say ""
  say "| what | ferry | peer | ratio | bar | holds | every value |"
  say "|---|---|---|---|---|---|---|"
}
# row TEXT NAME PEER [at-most|at-least RATIO]: a line of the table, and whether the ratio holds.
row() {
  local mine peer
  mine=$(median "$2"); peer=$(median "$3")
  [ "$mine" != - ] || return 0
  awk -v t="$1" -v m="$mine" -v p="$peer" -v pn="${3#*.}" -v how="${4:-}" -v bar="${5:-}" -v all="$(values "$2")" -v peers="$(values "$3")" 'BEGIN {
    r = p > 0 ? m / p : 0; good = how == "" ? "" : (how == "at-most" ? r <= bar : r >= bar) ? "yes" : "**no**"
    printf "| %s | %s | %s (%s) | %.2f | %s %s | %s | %s / %s |\n", t, m, p, pn, r, how, bar, good, all, peers }'
}
# limit TEXT NAME MOST: as row, against a number.
limit() {
  local mine; mine=$(median "$2")
  [ "$mine" != - ] || return 0
  awk -v t="$1" -v m="$mine" -v bar="$3" -v all="$(values "$2")" 'BEGIN {
    printf "| %s | %s | | | at-most %s | %s | %s |\n", t, m, bar, m <= bar ? "yes" : "**no**", all }'
}
