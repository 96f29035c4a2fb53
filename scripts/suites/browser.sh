# The page of `ferry dashboard` in a browser; sourced by scripts/test.
# shellcheck shell=bash

browser_page() {
  PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$tools/playwright \
    unshare --mount --propagation private --pid --fork --kill-child --mount-proc --net \
    /usr/bin/python3 "$repo/scripts/suites/browser.py" "$ferry" "$scratch"
}

suite_browser() {
  say "--- browser"
  check "Chromium is installed" 600 "$repo/scripts/setup" browser
  check "the dashboard under load and in trouble, by keyboard, on a phone" 300 browser_page
}
