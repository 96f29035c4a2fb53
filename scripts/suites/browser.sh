# The page of `ferry dashboard` in a browser; sourced by scripts/test.
# shellcheck shell=bash

browser_page() { PYTHONPATH=$tools/playwright in_namespaces browser; }

suite_browser() {
  say "--- browser"
  check "Chromium is installed" 600 "$repo/scripts/setup" browser
  check "the dashboard under load and in trouble, by keyboard, on a phone" 300 browser_page
}
