# The documentation site, the commands that its pages and README.md show, and the definition of a
# container; sourced by scripts/test.
# shellcheck shell=bash

docs_page() { "$repo/scripts/suites/docs.py" "$ferry" "$scratch" "$1"; }

# A page with each fault that the check of links looks for.
refuses_links() {
  local site=$scratch/links said
  mkdir -p "$site"
  echo '<a href="b.html#there">b</a><p id="here">' >"$site/a.html"
  echo '<a href="a.html#here">a</a><p id="there">' >"$site/b.html"
  "$repo/scripts/site-links.py" "$site"
  echo '<a href="c.html">c</a><a href="a.html#there">a</a><script src="https://example.org/x.js"></script>' >"$site/b.html"
  said=$("$repo/scripts/site-links.py" "$site") && return 1
  say "$said"
  grep -qx '2 pages, 3 links, 4 are wrong' <<<"$said"
}

# The package of which the image is made has its entry point.
container_entry() {
  local program
  program=$(sed -n 's/^ENTRYPOINT \["\/\(.*\)\/ferry"\]$/\1/p' "$repo/contrib/container/Containerfile")
  grep -qF "\"../../target/package/ferry\", \"$program/\"" "$repo/crates/ferry/Cargo.toml"
}

suite_docs() {
  local page
  say "--- docs"
  check "the site is built, and its links lead somewhere" 900 "$repo/scripts/site" build
  check "a link that leads nowhere is refused" 10 refuses_links
  check "the definition of a container has no fault" 30 "$tools/hadolint/bin/hadolint" "$repo/contrib/container/Containerfile"
  check "its entry point is in the package" 10 container_entry
  check "a page whose commands do something else is refused" 120 docs_page --self-check
  cd "$repo" || return
  for page in README.md docs/site/*.md docs/site/*/*.md; do
    [ "$page" = docs/site/SUMMARY.md ] || check "the commands of $page" 90 docs_page "$page"
  done
}
