"""Random operations on several mounts of one volume, one after the other: every answer is what one order gives.

usage: oneorder.py SECONDS SEED MOUNTPOINT…
"""

import errno
import mmap
import os
import random
import stat
import sys
import time

seconds, seed, mounts = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
rng = random.Random(seed)


class File:
    def __init__(self):
        self.data, self.mode, self.links = b"", 0o644, 1


names = {}  # (place, name): File
places = {"one": "one", "two": "two"}  # what each directory is called now
for place in places:
    os.mkdir(f"{mounts[0]}/{place}")
held = {mount: None for mount in mounts}  # a file that stays open: its descriptor and File


def pick():
    return rng.choice(sorted(places)), rng.choice("abcd")


def full(mount, path):
    place, name = path
    return f"{mount}/{places[place]}/{name}"


def expect(what, wanted):
    """Makes a call; its error, or None, is the one that is wanted."""
    try:
        result = what()
    except OSError as error:
        assert error.errno == wanted, f"{error}, not {wanted}"
        return None
    assert wanted is None, f"no error, not {errno.errorcode[wanted]}"
    return result


def step(mount):
    path, absent = pick(), errno.ENOENT
    at, file = full(mount, path), names.get(path)
    op = rng.choice(
        ["create", "write", "append", "cut", "mode", "remove", "rename", "link", "look", "look", "look", "read", "map", "hold", "held", "held", "move", "list"]
    )
    missing = None if file else absent
    if op == "create":
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        fd = expect(lambda: os.open(at, flags, 0o644), errno.EEXIST if file else None)
        if fd is not None:
            os.close(fd)
            names[path] = File()
    elif op in ("write", "append"):
        flags = os.O_WRONLY | (os.O_APPEND if op == "append" else 0)
        fd = expect(lambda: os.open(at, flags), missing)
        if fd is not None:
            data = bytes([rng.randrange(256)]) * rng.choice([1, 100, 5000])
            offset = 0 if op == "write" else len(file.data)
            os.write(fd, data)
            os.close(fd)
            file.data = file.data[:offset] + data + file.data[offset + len(data):]
    elif op == "cut":
        size = rng.randrange(6000)
        expect(lambda: os.truncate(at, size), missing)
        if file:
            file.data = file.data[:size].ljust(size, b"\0")
    elif op == "mode":
        mode = rng.choice([0o600, 0o644, 0o755])
        expect(lambda: os.chmod(at, mode), missing)
        if file:
            file.mode = mode
    elif op == "remove":
        expect(lambda: os.unlink(at), missing)
        if file:
            del names[path]
            file.links -= 1
    elif op == "rename":
        new = pick()
        expect(lambda: os.rename(at, full(mount, new)), missing)
        if file and names.get(new) is not file:
            if new in names:
                names[new].links -= 1
            names[new] = names.pop(path)
    elif op == "link":
        new = pick()
        wanted = missing or (errno.EEXIST if new in names else None)
        expect(lambda: os.link(at, full(mount, new)), wanted)
        if wanted is None:
            names[new] = file
            file.links += 1
    elif op == "look":
        found = expect(lambda: os.stat(at), missing)
        if file:
            seen = (found.st_size, stat.S_IMODE(found.st_mode), found.st_nlink)
            assert seen == (len(file.data), file.mode, file.links), f"{seen}"
    elif op == "read":
        fd = expect(lambda: os.open(at, os.O_RDONLY), missing)
        if fd is not None:
            data = os.read(fd, 1 << 20)
            os.close(fd)
            assert data == file.data, f"{len(data)} bytes, not {len(file.data)}"
    elif op == "map":
        fd = expect(lambda: os.open(at, os.O_RDONLY), missing)
        if fd is not None:
            if file.data:
                with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
                    assert mapped[:] == file.data, "what is mapped is not what is there"
            os.close(fd)
    elif op == "hold":
        fd = expect(lambda: os.open(at, os.O_RDONLY), missing)
        if fd is not None:
            if held[mount]:
                os.close(held[mount][0])
            held[mount] = fd, file
    elif op == "held":
        if held[mount]:
            fd, file = held[mount]
            data = os.pread(fd, 1 << 20, 0)
            assert data == file.data, f"{len(data)} bytes of an open file, not {len(file.data)}"
            assert os.fstat(fd).st_size == len(file.data), "the size of an open file"
    elif op == "move":
        place = path[0]
        old, new = places[place], place if places[place] != place else place + " moved"
        os.rename(f"{mount}/{old}", f"{mount}/{new}")
        places[place] = new
        expect(lambda: os.stat(f"{rng.choice(mounts)}/{old}"), absent)
    else:
        place = path[0]
        seen = sorted(os.listdir(f"{mount}/{places[place]}"))
        wanted = sorted(name for where, name in names if where == place)
        assert seen == wanted, f"{seen}, not {wanted}"
    return op, path


begun, steps = time.monotonic(), 0
while time.monotonic() - begun < seconds:
    which = rng.randrange(len(mounts))
    try:
        step(mounts[which])
    except AssertionError as error:
        sys.exit(f"seed {seed}, step {steps}, mount {which}: {error}")
    steps += 1
for handle in filter(None, held.values()):
    os.close(handle[0])
print(f"{steps} steps, seed {seed}")
assert steps > 100
