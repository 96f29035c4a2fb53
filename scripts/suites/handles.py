#!/usr/bin/env python3
"""File handles (name_to_handle_at, open_by_handle_at), as an NFS server uses them.

handles.py take DIRECTORY FILE: makes files, and writes their handles to FILE.
handles.py check DIRECTORY FILE: opens each of them with cold caches: what has a name opens, what has none is ESTALE."""
import ctypes
import errno
import json
import os
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
COUNT = 1024


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint), ("type", ctypes.c_int), ("data", ctypes.c_ubyte * 128)]


def take(path):
    handle, mount = Handle(bytes=128), ctypes.c_int()
    if libc.name_to_handle_at(-100, path.encode(), ctypes.byref(handle), ctypes.byref(mount), 0) != 0:
        raise OSError(ctypes.get_errno(), "name_to_handle_at", path)
    return [handle.type, bytes(handle.data[: handle.bytes]).hex()]


def opened(top, saved):
    """What a handle leads to; an errno otherwise."""
    data = bytes.fromhex(saved[1])
    handle = Handle(bytes=len(data), type=saved[0])
    handle.data[: len(data)] = data
    fd = libc.open_by_handle_at(top, ctypes.byref(handle), os.O_RDONLY)
    if fd < 0:
        return errno.errorcode[ctypes.get_errno()]
    try:
        return os.read(fd, 100).decode() if not os.path.isdir(f"/proc/self/fd/{fd}") else "directory"
    finally:
        os.close(fd)


def cold():
    with open("/proc/sys/vm/drop_caches", "w") as caches:
        caches.write("2\n")


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def make(top):
    """Names of files, and what is to become of the handle of each."""
    os.makedirs(f"{top}/dir/deep")
    handles = []
    for n in range(COUNT):
        path = f"{top}/dir/{n}"
        write(path, f"file {n}")
        handles.append([f"file {n}", take(path)])
    for n in range(COUNT):
        kind, path = n % 4, f"{top}/dir/{n}"
        if kind == 1:
            os.link(path, f"{top}/dir/deep/{n}")
            # One of two names goes.
            os.unlink(path if n % 8 < 4 else f"{top}/dir/deep/{n}")
        elif kind == 2:
            os.rename(path, f"{top}/dir/deep/moved-{n}")
        elif kind == 3:
            os.unlink(path)
            handles[n][0] = "ESTALE"
    handles.append(["directory", take(f"{top}/dir/deep")])
    os.mkdir(f"{top}/dir/gone")
    handles.append(["ESTALE", take(f"{top}/dir/gone")])
    os.rmdir(f"{top}/dir/gone")
    return handles


def lookup(top, saved):
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return opened(fd, saved)
    finally:
        os.close(fd)


def check(top, handles):
    cold()
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    wrong = [(wanted, got) for wanted, saved in handles if (got := opened(fd, saved)) != wanted]
    os.close(fd)
    assert not wrong, f"{len(wrong)} of {len(handles)}: {wrong[:8]}"


def main():
    what, top, file = sys.argv[1:]
    if what == "take":
        handles = make(top)
        write(file, json.dumps(handles))
        # A file that a program has open is found, though it has no name.
        write(f"{top}/open", "open")
        saved = take(f"{top}/open")
        held = os.open(f"{top}/open", os.O_RDONLY)
        os.unlink(f"{top}/open")
        check(top, [["open", saved]])
        os.close(held)
        # The kernel says that it has closed it after that.
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            cold()
            if lookup(top, saved) == "ESTALE":
                break
        check(top, [["ESTALE", saved]])
    else:
        with open(file) as saved:
            handles = json.load(saved)
        check(top, handles)


main()
