#!/usr/bin/env python3
"""One file on a mount, used in several ways at once. usage: onefile.py append|coherent|sparse|small DIRECTORY [SECONDS]"""
import mmap, os, random, struct, sys, time

BLOCK = 4096


def appends(directory, seconds):
    """Processes append records of any length, each by one write; no record is lost or has another's bytes inside."""
    path, processes, children = os.path.join(directory, "appends"), 6, []
    os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o644))
    for me in range(processes):
        pid = os.fork()
        if pid == 0:
            chance, fd, number = random.Random(me), os.open(path, os.O_WRONLY | os.O_APPEND), 0
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                length = chance.choice([20, 21, 100, 4095, 4096, 4097, 65536, 100_001, 1 << 20, 2_500_000])
                body = bytes([(me * 40 + number) % 251]) * (length - 16)
                record = struct.pack("<IIQ", me, number, length) + body
                if os.write(fd, record) != length:
                    os._exit(1)
                number += 1
            os._exit(0 if number else 1)
        children.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children), "an append failed or was short"
    found = [0] * processes
    with open(path, "rb") as file:
        while head := file.read(16):
            me, number, length = struct.unpack("<IIQ", head)
            assert me < processes and number == found[me], f"record {number} of {me} where {found} were"
            body = file.read(length - 16)
            assert body == bytes([(me * 40 + number) % 251]) * (length - 16), f"record {number} of {me} is mixed"
            found[me] += 1
    os.unlink(path)
    print(f"{sum(found)} records whole")


def coherent(directory, seconds):
    """What one way writes (write, O_DIRECT, a mapping) every other way reads at once."""
    path, chance, rounds = os.path.join(directory, "coherent"), random.Random(1), 0
    size = 64 * BLOCK
    plain = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    os.ftruncate(plain, size)
    direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    mapped = mmap.mmap(plain, size)
    aligned = mmap.mmap(-1, BLOCK)

    def read_direct(at):
        assert os.preadv(direct, [aligned], at) == BLOCK
        return aligned[:]

    def write_direct(at, data):
        aligned[:] = data
        assert os.pwritev(direct, [aligned], at) == BLOCK

    def store(at, data):
        mapped[at : at + BLOCK] = data

    readers = {
        "read": lambda at: os.pread(plain, BLOCK, at),
        "O_DIRECT read": read_direct,
        "load": lambda at: mapped[at : at + BLOCK],
    }
    writers = {"write": lambda at, data: os.pwrite(plain, data, at), "O_DIRECT write": write_direct, "store": store}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        at = chance.randrange(size // BLOCK) * BLOCK
        wrote, write = chance.choice(list(writers.items()))
        data = bytes([chance.randrange(256)]) * BLOCK
        for read in readers.values():
            read(at)  # so that it may have an old copy
        write(at, data)
        for name, read in readers.items():
            assert read(at) == data, f"after a {wrote} at {at} a {name} sees something else"
        rounds += 1
    mapped.close()
    os.unlink(path)
    print(f"{rounds} rounds")


def sparse(directory, seconds):
    """Random blocks of a file of 100 GiB."""
    fd = os.open(os.path.join(directory, "sparse"), os.O_CREAT | os.O_RDWR, 0o644)
    size, chance, count = 100 << 30, random.Random(1), 0
    os.ftruncate(fd, size)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(100):
            os.pwrite(fd, b"s" * BLOCK, chance.randrange(size // BLOCK) * BLOCK)
        count += 100
    print(f"{count} blocks")


def small(directory, _seconds):
    """50,000 files of 1 KiB."""
    for number in range(50_000):
        if number % 10_000 == 0:
            os.mkdir(f"{directory}/{number // 10_000}")
        with open(f"{directory}/{number // 10_000}/{number}", "wb") as file:
            file.write(b"k" * 1024)


what, where = sys.argv[1:3]
{"append": appends, "coherent": coherent, "sparse": sparse, "small": small}[what](
    where, float(sys.argv[3]) if len(sys.argv) > 3 else 5
)
