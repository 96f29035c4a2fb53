#!/usr/bin/env python3
"""What programs other than the owner's change of a file's attributes, and what they read of them, as on a local file system. usage: attributes.py local|remote DIRECTORY"""
import ctypes, errno, mmap, os, subprocess, sys

PAGE = 4096
NOBODY = 65534
libc = ctypes.CDLL(None, use_errno=True)
kind, where = sys.argv[1], sys.argv[2]


def called(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def fallocate(fd, mode, offset, length):
    called(libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)))


def written_directly(path):
    fd, page = os.open(path, os.O_WRONLY | os.O_DIRECT), mmap.mmap(-1, PAGE)
    assert os.pwritev(fd, [page], 0) == PAGE


def copied(path):
    source, fd = os.open(f"{where}/source", os.O_RDONLY), os.open(path, os.O_WRONLY)
    assert os.copy_file_range(source, fd, 2 << 20, 0, 0) > 0


KEEP, PUNCH, ZERO = 1, 2, 16
CHANGES = {
    "a write": lambda path: os.pwrite(os.open(path, os.O_WRONLY), b"x", 0),
    "a direct write": written_directly,
    "fallocate": lambda path: fallocate(os.open(path, os.O_WRONLY), 0, 0, 65536),
    "a hole": lambda path: fallocate(os.open(path, os.O_WRONLY), KEEP | PUNCH, 0, PAGE),
    "zeros": lambda path: fallocate(os.open(path, os.O_WRONLY), ZERO, 0, PAGE),
    "a copy": copied,
    "truncation": lambda path: os.truncate(path, 7),
}


def as_nobody(change, path):
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        change(path)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def mode_of(path):
    """By stat(1), which asks for the mode alone: the kernel answers that of what it has kept, though it asks again for size and times."""
    return int(subprocess.run(["stat", "-c", "%a", path], capture_output=True, check=True).stdout, 8)


def set_id_bits():
    with open(f"{where}/source", "wb") as source:
        source.write(bytes(2 << 20))
    for name, change in CHANGES.items():
        for user, left in ((as_nobody, 0o777), (lambda change, path: change(path), 0o6777)):
            path = f"{where}/s"
            with open(path, "wb") as file:
                file.write(bytes(8 * PAGE))
            os.chmod(path, 0o6777)
            assert mode_of(path) == 0o6777
            user(change, path)
            mode = mode_of(path)
            assert mode == left, f"after {name} the mode is {mode:o}, not {left:o}"
            os.unlink(path)


def access_times():
    path = f"{where}/read"
    with open(path, "wb") as file:
        file.write(bytes(PAGE))
    before = os.stat(path).st_atime_ns
    fd, page = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_NOATIME), mmap.mmap(-1, PAGE)
    os.preadv(fd, [page], 0)
    assert os.stat(path).st_atime_ns == before, "O_NOATIME has moved it"


def positions():
    fd = os.open(f"{where}/source", os.O_RDONLY)
    for position in (-1, 2 << 20):
        for what in (os.SEEK_DATA, os.SEEK_HOLE):
            try:
                raise AssertionError(f"a seek from {position} leads to {os.lseek(fd, position, what)}")
            except OSError as error:
                assert error.errno == errno.ENXIO, error


def births():
    made = int(subprocess.run(["stat", "-c", "%W", f"{where}/source"], capture_output=True, check=True).stdout)
    changed = os.stat(f"{where}/source").st_mtime
    assert 0 < made <= changed, f"made at {made}, changed at {changed}"


def whiteouts():
    for directory in (False, True):
        old, new = f"{where}/old", f"{where}/new"
        os.mkdir(old) if directory else os.close(os.open(old, os.O_CREAT | os.O_WRONLY))
        number = os.stat(old).st_ino
        called(libc.renameat2(-100, old.encode(), -100, new.encode(), 4))
        white = os.stat(old)
        assert (white.st_mode, white.st_rdev) == (0o020000, 0), f"{white}"
        assert os.stat(new).st_ino == number
        assert sorted(os.listdir(where)).count("old") == 1
        os.unlink(old)
        os.rmdir(new) if directory else os.unlink(new)


set_id_bits()
access_times()
positions()
if kind == "local":
    births()
whiteouts()
