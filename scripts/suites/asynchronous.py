#!/usr/bin/env python3
"""Asynchronous direct writes (libaio, O_DIRECT) beside readers through the page cache: what was
written is read at once.

usage: asynchronous.py DIRECTORY SECONDS

Twice: the readers have the file open before the direct writer opens it, and only after that.
"""
import ctypes
import mmap
import os
import random
import struct
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
IO_SETUP, IO_DESTROY, IO_GETEVENTS, IO_SUBMIT = 206, 207, 208, 209
PAGE, PAGES, DEPTH, READERS = 4096, 64, 8, 2


def call(what, *args):
    done = libc.syscall(*args)
    if done < 0:
        sys.exit(f"{what}: {os.strerror(ctypes.get_errno())}")
    return done


class Writer:
    """Writes numbers into pages, several at a time, past the page cache."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        self.context = ctypes.c_ulong()
        call("io_setup", IO_SETUP, DEPTH, ctypes.byref(self.context))
        # Direct requests need aligned memory.
        self.memory = mmap.mmap(-1, PAGE * DEPTH)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def write(self, pages, number):
        blocks = (ctypes.c_char * (64 * len(pages)))()
        pointers = (ctypes.c_void_p * len(pages))()
        for n, page in enumerate(pages):
            self.memory[n * PAGE : (n + 1) * PAGE] = struct.pack("<Q", number) * (PAGE // 8)
            # struct iocb: data, key, flags, opcode (1: pwrite), priority, descriptor, buffer,
            # length, offset.
            address = self.address + n * PAGE
            struct.pack_into("<QIIHhIQQq", blocks, 64 * n, n, 0, 0, 1, 0, self.fd, address, PAGE, page * PAGE)
            pointers[n] = ctypes.addressof(blocks) + 64 * n
        sent = call("io_submit", IO_SUBMIT, self.context, len(pages), pointers)
        assert sent == len(pages), f"{sent} of {len(pages)} were sent"
        events = (ctypes.c_char * (32 * len(pages)))()
        ended = call("io_getevents", IO_GETEVENTS, self.context, sent, sent, events, None)
        results = [struct.unpack_from("<q", events, 32 * n + 16)[0] for n in range(ended)]
        assert results == [PAGE] * len(pages), results

    def close(self):
        call("io_destroy", IO_DESTROY, self.context)
        os.close(self.fd)


def reader(path):
    """Brings pages into the cache, until it is killed. A page never goes back."""
    fd, last = os.open(path, os.O_RDONLY), [0] * PAGES
    while True:
        page = random.randrange(PAGES)
        numbers = struct.unpack("<512Q", os.pread(fd, PAGE, page * PAGE))
        assert numbers[0] >= last[page], f"page {page}: {numbers[0]} behind {last[page]}"
        last[page] = numbers[0]


def start(path):
    pid = os.fork()
    if pid == 0:
        try:
            reader(path)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
        os._exit(1)
    return pid


def run(directory, seconds, before):
    path = f"{directory}/direct-{'before' if before else 'after'}"
    with open(path, "wb") as file:
        file.write(bytes(PAGE * PAGES))
    readers, number = [], 0
    if before:
        readers, cached = [start(path) for _ in range(READERS)], os.open(path, os.O_RDONLY)
        os.pread(cached, PAGE * PAGES, 0)
    writer = Writer(path)
    if not before:
        readers, cached = [start(path) for _ in range(READERS)], os.open(path, os.O_RDONLY)
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            number += 1
            pages = random.sample(range(PAGES), DEPTH)
            writer.write(pages, number)
            for page in pages:
                seen = struct.unpack("<Q", os.pread(cached, 8, page * PAGE))[0]
                assert seen == number, f"page {page}: {number} was written, {seen} is read"
            assert os.waitpid(-1, os.WNOHANG) == (0, 0), "a reader ended"
    finally:
        for pid in readers:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    writer.close()
    os.close(cached)
    print(f"readers {'before' if before else 'after'} the writer: {number * DEPTH} writes")
    assert number > 10, "too few writes to mean anything"


for before in (True, False):
    run(sys.argv[1], float(sys.argv[2]), before)
