# The metrics, the rules and the dashboard for Grafana with Debian's Prometheus; sourced by scripts/test.
# shellcheck shell=bash

prometheus() {
  PYTHONDONTWRITEBYTECODE=1 unshare --mount --propagation private --pid --fork --kill-child --mount-proc --net \
    /usr/bin/python3 "$repo/scripts/suites/metrics.py" "$ferry" "$scratch"
}

suite_metrics() {
  say "--- metrics"
  check "Prometheus is installed" 300 "$repo/scripts/setup" metrics
  check "each panel has data, each rule is evaluated, alerts fire when they should" 120 prometheus
}
