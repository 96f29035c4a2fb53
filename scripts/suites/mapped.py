"""Files that are mapped into memory at several mounts of one volume: what one writes, the others see there a moment later.

usage: mapped.py TURNS DIRECTORY-AT-ONE-MOUNT DIRECTORY-AT-ANOTHER
"""

import mmap
import os
import sys
import time

turns, one, other = int(sys.argv[1]), sys.argv[2], sys.argv[3]
PAGE = 4096
PAGES = 16
# A moment; generous, for machines that are busy.
MOMENT = 20.0


class File:
    """The file at one mount, open and mapped."""

    def __init__(self, directory):
        self.fd = os.open(f"{directory}/mapped", os.O_RDWR | os.O_CREAT)
        if os.fstat(self.fd).st_size == 0:
            os.pwrite(self.fd, bytes(PAGE * PAGES), 0)
        self.map = mmap.mmap(self.fd, PAGE * PAGES)

    def shown(self, page):
        return int.from_bytes(self.map[page * PAGE : page * PAGE + 8], "little")

    def read(self, page):
        return int.from_bytes(os.pread(self.fd, 8, page * PAGE), "little")

    def write(self, page, number):
        os.pwrite(self.fd, number.to_bytes(8, "little"), page * PAGE)

    def store(self, page, number):
        self.map[page * PAGE : page * PAGE + 8] = number.to_bytes(8, "little")
        self.map.flush()


def sees(file, page, number):
    """Waits until the mapping shows the number; it never goes back, and never shows more."""
    last, since = 0, time.monotonic()
    while True:
        seen = file.shown(page)
        assert last <= seen <= number, f"{seen} behind {last}, {number} was written"
        if seen == number:
            return time.monotonic() - since
        assert time.monotonic() - since < MOMENT, f"{number} was written, {seen} is shown still"
        last = seen
        time.sleep(0.0005)


a, b = File(one), File(other)
waited = []
for turn in range(1, turns + 1):
    # A write elsewhere is seen in a mapping, a page that was seen before and one that was not.
    b.write(0, turn)
    waited.append(sees(a, 0, turn))
    b.write(turn % PAGES, turn)
    waited.append(sees(a, turn % PAGES, turn))
    # A store that is synced is read elsewhere, and shown in a mapping there.
    a.store(0, turn + turns)
    assert b.read(0) == turn + turns, "what was synced is read"
    waited.append(sees(b, 0, turn + turns))
    # Both at once, in pages of their own.
    a.store(1, turn)
    b.write(2, turn)
    assert (a.read(1), a.read(2), b.read(1), b.read(2)) == (turn, turn, turn, turn)
    for file in (a, b):
        waited += [sees(file, 1, turn), sees(file, 2, turn)]
    b.write(0, 0)
    while a.shown(0) != 0 or b.shown(0) != 0:
        time.sleep(0.0005)
    for page in range(PAGES):
        b.write(page, 0)
    while any(file.shown(page) for file in (a, b) for page in range(PAGES)):
        time.sleep(0.0005)
waited.sort()
print(f"{len(waited)} changes seen after {waited[len(waited) // 2] * 1e3:.1f} ms (median), {waited[-1] * 1e3:.0f} ms (longest)")
