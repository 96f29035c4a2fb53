#!/usr/bin/env python3
"""Asynchronous direct writes of a file that others read through the page cache: once one is complete, everybody reads it. usage: asynchronous.py DIRECTORY SECONDS"""
import ctypes, mmap, os, platform, random, struct, sys, time

PAGE, PAGES = 4096, 64
IO_SETUP, IO_GETEVENTS, IO_SUBMIT, PWRITE = 206, 208, 209, 1
libc = ctypes.CDLL(None, use_errno=True)


class Request(ctypes.Structure):
    """The kernel's `struct iocb`."""

    _fields_ = [("data", ctypes.c_uint64), ("key", ctypes.c_uint32), ("rw_flags", ctypes.c_uint32)]
    _fields_ += [("opcode", ctypes.c_uint16), ("priority", ctypes.c_int16), ("fd", ctypes.c_uint32)]
    _fields_ += [("buffer", ctypes.c_uint64), ("length", ctypes.c_uint64), ("offset", ctypes.c_int64)]
    _fields_ += [("reserved", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("event_fd", ctypes.c_uint32)]


if platform.machine() != "x86_64":
    sys.exit("the numbers of these system calls are those of x86_64")
path = os.path.join(sys.argv[1], "asynchronous")
plain = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)
os.pwrite(plain, bytes(PAGES * PAGE), 0)
reader = os.fork()
if reader == 0:
    chance = random.Random(1)
    while os.getppid() != 1:
        for _ in range(50):
            os.pread(plain, 8, chance.randrange(PAGES) * PAGE)
    os._exit(0)
direct, page = os.open(path, os.O_RDWR | os.O_DIRECT), mmap.mmap(-1, PAGE)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
context, event = ctypes.c_ulong(0), (ctypes.c_uint64 * 4)()
assert libc.syscall(IO_SETUP, 128, ctypes.byref(context)) == 0
chance, number, stale, end = random.Random(2), 0, 0, time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    number += 1
    at = chance.randrange(PAGES) * PAGE
    os.pread(plain, 8, at)
    page[:8] = struct.pack("<Q", number)
    request = Request(opcode=PWRITE, fd=direct, buffer=address, length=PAGE, offset=at)
    requests = (ctypes.c_void_p * 1)(ctypes.addressof(request))
    assert libc.syscall(IO_SUBMIT, context, 1, requests) == 1
    assert libc.syscall(IO_GETEVENTS, context, 1, 1, event, None) == 1
    assert event[2] == PAGE
    stale += os.pread(plain, 8, at) != struct.pack("<Q", number)
os.kill(reader, 9)
os.unlink(path)
print(f"{stale} of {number} were not read at once")
sys.exit(stale > 0)
