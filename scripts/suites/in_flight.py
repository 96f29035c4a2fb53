#!/usr/bin/env python3
"""Many fsyncs in flight at once, by programs that know nothing of FerryFS.

usage: in_flight.py DIRECTORY uring|libaio|threads COUNT [DAEMON]

Writes COUNT files of 4 KiB, starts an fsync of each before it waits for any, and waits for all.
Prints the rate in files a second; with the number of a process also the most threads that it had
meanwhile. Ends with an error if an fsync failed.
"""
import ctypes
import mmap
import os
import resource
import struct
import sys
import threading
import time

libc = ctypes.CDLL(None, use_errno=True)
SETUP, ENTER = 425, 426
GETEVENTS, OP_FSYNC = 1, 3


def failed(what):
    errno = ctypes.get_errno()
    sys.exit(f"{what}: {os.strerror(errno)}")


def by_uring(fds):
    """IORING_OP_FSYNC: one submission for all."""
    entries = 1 << (len(fds) - 1).bit_length()
    params = (ctypes.c_ubyte * 120)()
    ring = libc.syscall(SETUP, entries, params)
    if ring < 0:
        failed("io_uring_setup")
    words = struct.unpack("30I", bytes(params))
    sq_entries, cq_entries = words[0], words[1]
    # struct io_sqring_offsets begins at word 10, struct io_cqring_offsets at word 20.
    sq_tail, sq_mask, sq_array = words[11], words[12], words[16]
    cq_head, cq_tail, cq_mask, cqes = words[20], words[21], words[22], words[25]
    sq = mmap.mmap(ring, sq_array + 4 * sq_entries, offset=0)
    cq = mmap.mmap(ring, cqes + 16 * cq_entries, offset=0x8000000)
    sqes = mmap.mmap(ring, 64 * sq_entries, offset=0x10000000)
    word = lambda area, at: struct.unpack_from("I", area, at)[0]
    mask = word(sq, sq_mask)
    for n, fd in enumerate(fds):
        struct.pack_into("BBHiQQIIQ", sqes, 64 * n, OP_FSYNC, 0, 0, fd, 0, 0, 0, 0, n)
        struct.pack_into("I", sq, sq_array + 4 * (n & mask), n)
    struct.pack_into("I", sq, sq_tail, len(fds))
    submit = len(fds)
    while word(cq, cq_tail) - word(cq, cq_head) < len(fds):
        done = libc.syscall(ENTER, ring, submit, len(fds), GETEVENTS, None, 0)
        if done < 0:
            failed("io_uring_enter")
        submit -= done
    mask = word(cq, cq_mask)
    results = [struct.unpack_from("i", cq, cqes + 16 * (n & mask) + 8)[0] for n in range(len(fds))]
    os.close(ring)
    return results


def by_libaio(fds):
    """IOCB_CMD_FSYNC: one io_submit for all, or as many as it takes."""
    context = ctypes.c_ulong(0)
    if libc.syscall(206, len(fds), ctypes.byref(context)) < 0:
        failed("io_setup")
    # struct iocb: data, key, rw_flags, opcode, reqprio, fd; the rest is zero.
    blocks = [
        ctypes.create_string_buffer(struct.pack("QIIHhI", n, 0, 0, 2, 0, fd).ljust(64, b"\0"), 64)
        for n, fd in enumerate(fds)
    ]
    pointers = (ctypes.c_void_p * len(fds))(*[ctypes.addressof(block) for block in blocks])
    submitted = 0
    while submitted < len(fds):
        rest = ctypes.byref(pointers, 8 * submitted)
        done = libc.syscall(209, context, len(fds) - submitted, rest)
        if done <= 0:
            failed("io_submit")
        submitted += done
    events = (ctypes.c_ubyte * (32 * len(fds)))()
    arrived = 0
    while arrived < len(fds):
        rest = ctypes.byref(events, 32 * arrived)
        done = libc.syscall(208, context, 1, len(fds) - arrived, rest, None)
        if done < 0:
            failed("io_getevents")
        arrived += done
    libc.syscall(207, context)
    return [struct.unpack_from("q", events, 32 * n + 16)[0] for n in range(len(fds))]


def by_threads(fds):
    """fsync(2) in a thread for each file."""
    results = [0] * len(fds)
    start = threading.Barrier(len(fds))

    def sync(n, fd):
        start.wait()
        try:
            os.fsync(fd)
        except OSError as error:
            results[n] = -error.errno

    threading.stack_size(128 << 10)
    threads = [threading.Thread(target=sync, args=pair) for pair in enumerate(fds)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def watch(process, most, over):
    """The most threads that a process has."""
    while not over.is_set():
        most[0] = max(most[0], len(os.listdir(f"/proc/{process}/task")))
        over.wait(0.002)


def main():
    directory, how, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    daemon = sys.argv[4] if len(sys.argv) > 4 else None
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, max(count + 100, 4096)))
    fds = []
    for n in range(count):
        fd = os.open(f"{directory}/{n}", os.O_RDWR | os.O_CREAT, 0o644)
        os.write(fd, n.to_bytes(4, "little") * 1024)
        fds.append(fd)
    most, over = [0], threading.Event()
    watcher = threading.Thread(target=watch, args=(daemon, most, over))
    if daemon:
        watcher.start()
    begun = time.monotonic()
    results = {"uring": by_uring, "libaio": by_libaio, "threads": by_threads}[how](fds)
    taken = time.monotonic() - begun
    over.set()
    bad = [result for result in results if result < 0]
    if bad:
        sys.exit(f"{len(bad)} fsyncs failed, the first one: {os.strerror(-bad[0])}")
    print(f"files {count / taken:.0f}")
    if daemon:
        watcher.join()
        print(f"daemon_threads {most[0]}")


main()
