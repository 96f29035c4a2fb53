#!/usr/bin/env python3
# Several clients move directories, one system call after the other. Each client finds a directory
# where it is, and nowhere else.
# usage: moved.py SECONDS SEED DIR… (the same directory on each mount)
import ctypes
import errno
import os
import random
import sys
import time

EXCHANGE = 2
libc = ctypes.CDLL(None, use_errno=True)
seconds, chance, roots = float(sys.argv[1]), random.Random(int(sys.argv[2])), sys.argv[3:]
NAMES = [*"abcd", *(f"{a}/{b}" for a in "abcd" for b in "abcd"), *(f"{a}/{b}/{c}" for a in "ab" for b in "ab" for c in "ab")]
where = {}  # the inode that is at a path
waited = 0


def rename(old, new, flags=0):
    if libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def patient(act):
    """What an own rename cannot find at once, for its kernel knows it elsewhere, it finds a moment later."""
    global waited
    until = time.monotonic() + 2
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno != errno.ESTALE or time.monotonic() > until:
                raise
            waited += 1
            time.sleep(0.005)


def inode(root, path):
    try:
        return patient(lambda: os.stat(f"{root}/{path}").st_ino)
    except FileNotFoundError:
        return None


def walk(root):
    """The paths of the directories below `root`. `os.walk` passes over errors unless it is told of one that raises."""

    def fail(error):
        raise error

    return {os.path.relpath(f"{top}/{name}", root) for top, names, _ in os.walk(root, onerror=fail) for name in names}


def look(root):
    for path in chance.sample(NAMES, 12):
        found = inode(root, path)
        assert found == where.get(path), f"{root}/{path} is {found}, not {where.get(path)}"


def below(path):
    return [other for other in where if other == path or other.startswith(path + "/")]


def move(pairs):
    moved = {}
    for old, new in pairs:
        for path in below(old):
            moved[new + path[len(old) :]] = where.pop(path)
    where.update(moved)


def is_inside(path, other):
    return path == other or path.startswith(other + "/")


rounds = 0
until = time.monotonic() + seconds
while time.monotonic() < until:
    rounds += 1
    root, what = chance.choice(roots), chance.random()
    old, new = chance.choice(NAMES), chance.choice(NAMES)
    parent_is_there = "/" not in new or os.path.dirname(new) in where
    if what < 0.2 and new not in where and parent_is_there:
        os.mkdir(f"{root}/{new}")
        where[new] = os.stat(f"{root}/{new}").st_ino
    elif what < 0.6 and old in where and new not in where and parent_is_there and not is_inside(new, old):
        if all(new + path[len(old) :] in NAMES for path in below(old)):
            patient(lambda: rename(f"{root}/{old}", f"{root}/{new}"))
            move([(old, new)])
    elif what < 0.8 and old in where and new in where and not is_inside(old, new) and not is_inside(new, old):
        both = [(old, new), (new, old)]
        if all(there + path[len(here) :] in NAMES for here, there in both for path in below(here)):
            patient(lambda: rename(f"{root}/{old}", f"{root}/{new}", EXCHANGE))
            move(both)
    elif what < 0.95:
        walked = patient(lambda: walk(root))
        assert walked == set(where), f"{root}: {walked ^ set(where)}"
    elif old in where and len(below(old)) == 1:
        patient(lambda: os.rmdir(f"{root}/{old}"))
        del where[old]
    look(chance.choice(roots))
print(f"{rounds} rounds, {waited} times not at once")
assert rounds > 200
