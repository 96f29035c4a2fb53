# The documentation site, the commands that its pages and README.md show, and the definition of a
# container; sourced by scripts/test.
# shellcheck shell=bash

docs_page() { PYTHONDONTWRITEBYTECODE=1 "$repo/scripts/suites/docs.py" "$ferry" "$scratch" "$1"; }

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

# A mount with the capabilities that an engine gives by default, and SYS_ADMIN, in a mount namespace
# with the volume's directory and one that the host shares. Both see the files. SIGTERM unmounts.
container_mount() {
  local host=$scratch/host inside=$scratch/inside capabilities mount
  capabilities=-all,+chown,+dac_override,+fowner,+fsetid,+kill,+setgid,+setuid,+setpcap,+net_bind_service
  capabilities+=,+net_raw,+sys_chroot,+mknod,+audit_write,+setfcap,+sys_admin
  mkdir -p "$host/data" "$inside"
  "$ferry" mkfs "$scratch/contained.ferry" --size 1G
  mount --bind "$host" "$host"
  mount --make-private "$host"
  mount --make-shared "$host"
  # shellcheck disable=SC2016
  unshare --mount --propagation unchanged sh -euc '
    mount --make-private /
    mount --bind "$1" "$2"
    exec setpriv --bounding-set "$3" "$4" mount --foreground "$5" "$2"' \
    container "$host/data" "$inside" "$capabilities" "$ferry" "$scratch/contained.ferry" &
  mount=$!
  until mountpoint -q "$host/data"; do kill -0 "$mount"; sleep 0.05; done
  echo hello >"$host/data/file"
  [ "$(cat "/proc/$mount/root$inside/file")" = hello ]
  kill -TERM "$mount"
  wait "$mount"
  ! mountpoint -q "$host/data" || return
  umount "$host"
  "$ferry" fsck "$scratch/contained.ferry"
}

suite_docs() {
  local page
  say "--- docs"
  check "the site is built, and its links lead somewhere" 900 "$repo/scripts/site" build
  check "a link that leads nowhere is refused" 10 refuses_links
  check "the definition of a container has no fault" 30 "$tools/hadolint/bin/hadolint" "$repo/contrib/container/Containerfile"
  check "a mount with a container's capabilities reaches the host" 60 container_mount
  check "a page whose commands do something else is refused" 120 docs_page --self-check
  cd "$repo" || return
  for page in README.md docs/site/*.md docs/site/*/*.md; do
    [ "$page" = docs/site/SUMMARY.md ] || check "the commands of $page" 90 docs_page "$page"
  done
}
