# The packages, and what they install in a bare Debian; sourced by scripts/test.
# shellcheck shell=bash

# less_exposed UNIT: what systemd says of a unit, which has to be below 5.
less_exposed() {
  local exposure
  exposure=$(systemd-analyze security --offline=true "$repo/contrib/$1.service" |
    sed -n 's/.*exposure level for .*: \([0-9.]*\) .*/\1/p')
  say "$1: exposure $exposure"
  awk -v exposure="$exposure" 'BEGIN { exit !(exposure != "" && exposure < 5) }'
}

# What systemd says of all units, with the program that was built: nothing.
verified() {
  local said unit units=$scratch/units
  mkdir -p "$units"
  for unit in "$repo"/contrib/*@.*; do
    sed "s,/usr/bin/ferry,$ferry," "$unit" >"$units/$(basename "$unit")"
  done
  said=$(cd "$units" && systemd-analyze verify --man=no ./*@.* 2>&1) && [ -z "$said" ] || { say "$said"; return 1; }
}

# From nothing to a file on a mount, and back, with what the package brings.
in_bare_debian() {
  local root=$scratch/debian
  cp "$target"/packages/*.deb "$root/tmp/ferryfs.deb"
  mount -t proc proc "$root/proc"
  mount --bind /dev "$root/dev"
  chroot "$root" /bin/sh -euxc '
    test -z "$(command -v cc)"
    dpkg -i /tmp/ferryfs.deb
    ferry mkfs /srv/data.ferry --size 1G
    mount -t fuse.ferry /srv/data.ferry /mnt
    cp -a /usr/share /mnt/share
    diff -r /usr/share /mnt/share
    program() { readlink "/proc/$(ferry stats /mnt --json | grep -o "\"daemon\": *[0-9]*" | grep -o "[0-9]*\$")/exe"; }
    echo begun >/mnt/open
    exec 3>>/mnt/open
    cp /usr/bin/ferry /usr/bin/ferry.other
    mv /usr/bin/ferry.other /usr/bin/ferry
    test "$(program)" = "/usr/bin/ferry (deleted)"
    dpkg -i /tmp/ferryfs.deb
    test "$(program)" = /usr/bin/ferry
    echo ended >&3
    test "$(cat /mnt/open)" = "$(printf "begun\nended")"
    exec 3>&-
    ferry umount /mnt
    ferry fsck /srv/data.ferry
    dpkg --purge ferryfs
    test ! -e /usr/bin/ferry
    test ! -e /usr/sbin/mount.fuse.ferry
    test ! -e /etc/ferryfs
    test -e /srv/data.ferry'
}
leave_debian() {
  local mount
  for mount in mnt dev proc; do
    ! mountpoint -q "$scratch/debian/$mount" || umount "$scratch/debian/$mount" || return
  done
}

# The units, with the systemd of a Debian that is booted. It has a network and processes of its own.
under_systemd() {
  local root=$scratch/debian booted inside=() status=0
  cp "$repo/scripts/suites/units.sh" "$root/tmp/ferryfs.deb" "$root/root"
  systemd-nspawn --quiet --register=no --keep-unit --private-network --directory="$root" --bind=/dev/fuse \
    --console=pipe --boot >"$scratch/boot" 2>&1 </dev/null &
  booted=$!
  inside=(nsenter --all --target "")
  for _ in $(seq 100); do
    inside[3]=$(pgrep --parent "$booted" || true)
    "${inside[@]}" systemctl is-system-running --quiet 2>/dev/null && break
    sleep 0.3
  done
  "${inside[@]}" sh -eux /root/units.sh || status=$?
  [ "$status" = 0 ] || "${inside[@]}" journalctl --no-pager --lines=60 --unit="ferry*"
  "${inside[@]}" systemctl poweroff || kill "$booted"
  wait "$booted" || true
  return "$status"
}

# What contrib/container/Containerfile does to its base, which has no less than this Debian, and what
# the image runs.
makes_image() {
  local root=$scratch/debian file=$repo/contrib/container/Containerfile install entry
  install=$(sed -n 's,^RUN --mount=type=bind\,target=/packages ,,p' "$file")
  entry=$(sed -n 's/^ENTRYPOINT \["\(.*\)"\]$/\1/p' "$file")
  mkdir "$root/packages"
  cp "$target"/packages/*.deb "$root/packages"
  chroot "$root" /bin/sh -euxc "$install; $entry --version; $entry --help >/dev/null; dpkg --purge ferryfs"
}

completes() {
  bash -c '. "$1"; COMP_WORDS=(ferry moun); COMP_CWORD=1; _ferry ferry moun ferry; [ "${COMPREPLY[*]}" = mount ]' \
    completes "$target/package/ferry.bash"
  zsh -n "$target/package/_ferry"
  fish --no-execute "$target/package/ferry.fish"
}

# Into a directory of its own: this machine has no other packages that rpm knows.
installs_rpm() {
  local root=$scratch/rpm
  mkdir "$root"
  rpm --root "$root" --install --nodeps --noscripts --force-debian "$target"/packages/*.rpm || return
  "$root/usr/bin/ferry" --version || return
  [ "$(realpath "$root/usr/sbin/mount.fuse.ferry")" = "$(realpath "$root/usr/bin/ferry")" ] || return
  [ -e "$root/usr/lib/systemd/system/ferry@.service" ] && [ -e "$root/usr/share/man/man1/ferry.1.gz" ]
}

# The paths of crates in the program's messages are in no list that cargo makes. Of the program as it is
# installed: debug information has such paths without an end.
lists_components() {
  local shown=$scratch/shown listed=$scratch/listed
  grep -aoE 'registry/src/[^/]+/[A-Za-z0-9_-]+-[0-9]+\.[A-Za-z0-9.+-]*' "$target/package/ferry" | sed 's,.*/,,' | sort -u >"$shown"
  python3 -c 'import json, sys
for one in json.load(open(sys.argv[1]))["components"]:
    print(one["name"] + "-" + one["version"])' "$target"/packages/*.cdx.json | sort -u >"$listed"
  [ "$(wc -l <"$shown")" -ge 20 ] || { say "the program shows $(wc -l <"$shown") crates only"; return 1; }
  say "$(wc -l <"$listed") components, of which the program shows $(wc -l <"$shown")"
  [ -z "$(comm -23 "$shown" "$listed")" ] || { say "missing: $(comm -23 "$shown" "$listed" | xargs)"; return 1; }
}

has_sources() {
  local sources
  sources=$(tar tzf "$(echo "$target"/packages/ferryfs-*.tar.gz)" | grep -v '/$' | sed 's,^[^/]*/,,' | sort)
  [ "$sources" = "$(git -C "$repo" ls-tree -r --name-only HEAD | sort)" ]
}

suite_package() {
  say "--- package"
  check "a release is made" 900 "$repo/scripts/release" --programs-as-they-are
  check "their checksums are right" 60 sh -c 'cd "$1" && sha256sum --check --quiet SHA256SUMS' check "$target/packages"
  check "the list of components has all that the program shows" 60 lists_components
  check "the sources are whole" 60 has_sources
  check "lintian finds no error" 120 lintian --fail-on error,warning --allow-root "$target"/packages/*.deb
  check "the rpm can be installed, and its program runs" 30 installs_rpm
  check "the manual pages are well-formed" 60 mandoc -Tlint -W warning "$target"/package/man/*.1
  check "shells complete commands" 60 completes
  check "the mount's unit is hardened" 30 less_exposed ferry@
  check "the server's unit is hardened" 30 less_exposed ferry-serve@
  check "the unit of snapshots is hardened" 30 less_exposed ferry-snapshot@
  check "systemd takes all units" 60 verified
  check "a bare Debian 12 is there" 600 mmdebstrap --quiet --variant=minbase --include=dbus,systemd-sysv bookworm "$scratch/debian"
  check "from the package to a file on a mount, and back" 60 in_bare_debian
  check "a container's image can be made of it" 60 makes_image
  check "the bare Debian is left" 30 leave_debian
  check "systemd runs all units, and restarts a mount that programs use" 180 under_systemd
}
