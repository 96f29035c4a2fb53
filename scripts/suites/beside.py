#!/usr/bin/env python3
"""Writes and stores to different bytes of the same pages of one file: none of them is lost. usage: beside.py DIRECTORY SECONDS"""
import mmap, os, random, struct, sys, time

PAGE = 4096
PAGES = 64
# Where in each page the two put their numbers.
WHERE = {"write": 0, "store": 2048}
ONES = {
    "made for writing only": os.O_WRONLY,
    "made for reading and writing": os.O_RDWR,
    "made for writing only, synchronously": os.O_WRONLY | os.O_DSYNC,
}


class Turns:
    """Two processes begin and end a round together; what they say is in memory that both have."""

    def __init__(self):
        self.said = mmap.mmap(-1, PAGE)

    def meet(self, me, number):
        mine, others = (0, 8) if me == "write" else (8, 0)
        self.said[mine : mine + 8] = struct.pack("<Q", number)
        end = time.monotonic() + 60
        while struct.unpack("<Q", self.said[others : others + 8])[0] < number:
            assert time.monotonic() < end, f"the other of {me} has stopped at round {number}"
            os.sched_yield()

    def has_come(self, other, number):
        at = 0 if other == "write" else 8
        return struct.unpack("<Q", self.said[at : at + 8])[0] >= number

    def stop(self):
        self.said[16] = 1

    def stopped(self):
        return self.said[16] == 1


def lost(path, me, number):
    """Pages that a new descriptor does not find as `me` left them."""
    fd = os.open(path, os.O_RDONLY)
    want = struct.pack("<Q", number)
    bad = [page for page in range(PAGES) if os.pread(fd, 8, page * PAGE + WHERE[me]) != want]
    os.close(fd)
    return bad


def work(path, me, fd, turns, seconds):
    """Returns how many of its numbers were lost, of how many."""
    mapped = mmap.mmap(fd, PAGES * PAGE) if me == "store" else None
    chance, end, number, gone = random.Random(7), time.monotonic() + seconds, 0, 0
    while True:
        number += 1
        if me == "write" and time.monotonic() > end:
            turns.stop()
        turns.meet(me, 4 * number)
        if turns.stopped():
            return gone, (number - 1) * PAGES
        pages, wrote = list(range(PAGES)), 0
        chance.shuffle(pages)
        for page in pages:
            at = page * PAGE + WHERE[me]
            if mapped:
                mapped[at : at + 8] = struct.pack("<Q", number)
            else:
                assert os.pwrite(fd, struct.pack("<Q", number), at) == 8
        # The storing thread goes on for as long as the other writes: each write meets a page that
        # is being used.
        while mapped and not turns.has_come("write", 4 * number + 1):
            page, wrote = chance.randrange(PAGES), wrote + 1
            at = page * PAGE + WHERE[me]
            mapped[at : at + 8] = struct.pack("<Q", number)
            if wrote % 64 == 0:
                mapped.flush(page * PAGE, PAGE)
        turns.meet(me, 4 * number + 1)
        if number % 8 == 0:
            if mapped:
                mapped.flush()
            os.fsync(fd)
            turns.meet(me, 4 * number + 2)
        gone += len(lost(path, me, number))
        if mapped:
            bytes_of = [mapped[page * PAGE + WHERE[me] :][:8] for page in range(PAGES)]
            gone += sum(one != struct.pack("<Q", number) for one in bytes_of)
            # The mapping shows the writes of the other, too.
            shown = [mapped[page * PAGE :][:8] for page in range(PAGES)]
            gone += sum(one != struct.pack("<Q", number) for one in shown)
        turns.meet(me, 4 * number + 3)


def one(directory, name, flags, seconds):
    path, turns = os.path.join(directory, "beside"), Turns()
    maker = os.open(path, os.O_CREAT | os.O_EXCL | flags, 0o644)
    os.ftruncate(maker, PAGES * PAGE)
    child = os.fork()
    if child == 0:
        mapper = os.open(path, os.O_RDWR)
        gone, of = work(path, "store", mapper, turns, seconds)
        print(f"{name}: {gone} of {of} stores are lost or not shown", flush=True)
        os._exit(1 if gone else 0)
    gone, of = work(path, "write", maker, turns, seconds)
    print(f"{name}: {gone} of {of} writes are lost", flush=True)
    broken = os.waitpid(child, 0)[1] != 0 or gone
    os.close(maker)
    os.unlink(path)
    return broken


where, seconds = sys.argv[1], float(sys.argv[2])
sys.exit(any([one(where, name, flags, seconds / len(ONES)) for name, flags in ONES.items()]))
