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

completes() {
  bash -c '. "$1"; COMP_WORDS=(ferry moun); COMP_CWORD=1; _ferry ferry moun ferry; [ "${COMPREPLY[*]}" = mount ]' \
    completes "$target/package/ferry.bash"
  zsh -n "$target/package/_ferry"
  fish --no-execute "$target/package/ferry.fish"
}

suite_package() {
  say "--- package"
  check "the packages are made" 900 "$repo/scripts/package" --programs-as-they-are
  check "their checksums are right" 60 sh -c 'cd "$1" && sha256sum --check --quiet SHA256SUMS' check "$target/packages"
  check "lintian finds no error" 120 lintian --fail-on error,warning --allow-root "$target"/packages/*.deb
  check "the rpm has the program" 30 sh -c 'rpm -qlp "$1" | grep -qx /usr/bin/ferry' check "$target"/packages/*.rpm
  check "the manual pages are well-formed" 60 mandoc -Tlint -W warning "$target"/package/man/*.1
  check "shells complete commands" 60 completes
  check "the mount's unit is hardened" 30 less_exposed ferry@
  check "the server's unit is hardened" 30 less_exposed ferry-serve@
  check "the unit of snapshots is hardened" 30 less_exposed ferry-snapshot@
  check "systemd takes all units" 60 verified
  check "a bare Debian 12 is there" 600 mmdebstrap --quiet --variant=minbase bookworm "$scratch/debian"
  check "from the package to a file on a mount, and back" 60 in_bare_debian
  check "the bare Debian is left" 30 leave_debian
}
