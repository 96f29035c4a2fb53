"""One writer, and readers at all mounts of one volume at the same time: nobody reads less than the writer's last call that had returned.

usage: returned.py SECONDS DIRECTORY-AT-THE-WRITER DIRECTORY-AT-A-READER…
"""

import multiprocessing
import os
import sys
import time

seconds, writer, readers = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
NUMBER = 8


def number(data):
    return int.from_bytes(data[:NUMBER], "little")


def append_write(fd, path, turn):
    os.write(fd, b"x")
    return turn


def append_read(fd, path):
    data = os.pread(fd, 1 << 20, 0)
    assert data.count(b"x") == len(data), "bytes that nobody has written"
    return len(data)


def over_write(fd, path, turn):
    os.pwrite(fd, turn.to_bytes(NUMBER, "little"), 0)
    # A reader that compares only times sees no difference.
    os.utime(fd, ns=(1, 1))
    return turn


def over_read(fd, path):
    return number(os.pread(fd, NUMBER, 0))


def name_write(fd, path, turn):
    with open(f"{path}.new", "wb") as file:
        file.write(turn.to_bytes(NUMBER, "little"))
    os.rename(f"{path}.new", path)
    return turn


def name_read(fd, path):
    with open(path, "rb") as file:
        return number(file.read())


def size_write(fd, path, turn):
    os.ftruncate(fd, turn)
    return turn


def size_read(fd, path):
    return os.stat(path).st_size


KINDS = {
    "append": (append_write, append_read),
    "over": (over_write, over_read),
    "name": (name_write, name_read),
    "size": (size_write, size_read),
}


def read(kind, path, returned, over, failed):
    fd, reads = os.open(path, os.O_RDONLY), 0
    try:
        while not over.value:
            wanted = returned.value
            seen = KINDS[kind][1](fd, path)
            assert seen >= wanted, f"{seen}, though {wanted} had returned"
            reads += 1
        assert reads > 10, f"{reads} reads"
    except (AssertionError, OSError) as error:
        failed.value = 1
        print(f"{kind}, {path}: {error}", flush=True)
    os.close(fd)


def run(kind):
    path = f"{writer}/{kind}"
    fd = os.open(path, os.O_CREAT | os.O_RDWR | (os.O_APPEND if kind == "append" else 0), 0o644)
    returned, over, failed = (multiprocessing.Value("q", 0, lock=False) for _ in range(3))
    if kind in ("over", "name"):
        os.pwrite(fd, bytes(NUMBER), 0)
    people = [
        multiprocessing.Process(target=read, args=(kind, f"{reader}/{kind}", returned, over, failed))
        for reader in readers
        for _ in range(2)
    ]
    for one in people:
        one.start()
    begun, turn = time.monotonic(), 0
    while time.monotonic() - begun < seconds and not failed.value:
        turn += 1
        returned.value = KINDS[kind][0](fd, path, turn)
    over.value = 1
    for one in people:
        one.join()
    os.close(fd)
    print(f"{kind}: {turn} writes")
    assert turn > 10 and not failed.value, kind


for kind in KINDS:
    run(kind)
