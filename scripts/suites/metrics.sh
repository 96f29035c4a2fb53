# The metrics, the rules and the dashboard for Grafana with Debian's Prometheus; sourced by scripts/test.
# shellcheck shell=bash

prometheus() { in_namespaces metrics; }

suite_metrics() {
  say "--- metrics"
  check "Prometheus is installed" 300 "$repo/scripts/setup" metrics
  check "each panel has data, each rule is evaluated, alerts fire when they should" 120 prometheus
}
