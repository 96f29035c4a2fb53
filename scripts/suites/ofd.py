#!/usr/bin/env python3
"""Locks of open file descriptions on two mounts of one server: they end with their description. usage: ofd.py DIRECTORY DIRECTORY"""
import errno, fcntl, os, signal, struct, sys, time

F_OFD_SETLK = 37
WAIT_SECONDS_MAX = 10
here, there = (os.path.join(directory, "ofd") for directory in sys.argv[1:3])


def lock(fd, command=F_OFD_SETLK, first=0, count=0):
    """Whether the write lock could be had."""
    try:
        fcntl.fcntl(fd, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, first, count, 0))
        return True
    except OSError as error:
        assert error.errno == errno.EAGAIN, error
        return False


def ends(what):
    """Both clients can lock it: the kernel tells of the last close when that has returned."""
    for path in (there, here):
        fd = os.open(path, os.O_RDWR)
        end = time.monotonic() + WAIT_SECONDS_MAX
        while not lock(fd):
            assert time.monotonic() < end, f"{what}: still locked"
            time.sleep(0.01)
        os.close(fd)


def is_held(what, first=0, count=0):
    for path in (there, here):
        fd = os.open(path, os.O_RDWR)
        assert not lock(fd, first=first, count=count), f"{what}: not locked any more"
        os.close(fd)


def child(work):
    """A process that has done its work and waits; to be killed."""
    done, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(tell, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(done, 1) == b"x", "the child failed"
    os.close(done)
    return pid


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


fd = os.open(here, os.O_RDWR | os.O_CREAT)
assert lock(fd)
is_held("locked")
os.close(fd)
ends("closed")

# The description lives in another process and behind another descriptor.
fd = os.open(here, os.O_RDWR)
assert lock(fd)
pid = child(lambda: None)
os.close(os.dup(fd))
os.close(os.open(here, os.O_RDWR))
os.close(fd)
is_held("a child has it")
kill(pid)
ends("the child was killed")

pid = child(lambda: lock(os.open(here, os.O_RDWR)) or sys.exit(1))
is_held("locked by a process")
kill(pid)
ends("killed")

# A process keeps its own lock when the description of another goes, and has lost it by its own
# close.
fd = os.open(here, os.O_RDWR)
assert lock(fd, fcntl.F_SETLK, 0, 10)
kill(child(lambda: lock(os.open(here, os.O_RDWR), first=10, count=10) or sys.exit(1)))
other = os.open(there, os.O_RDWR)
end = time.monotonic() + WAIT_SECONDS_MAX
while not lock(other, first=10, count=10):
    assert time.monotonic() < end, "the other range: still locked"
    time.sleep(0.01)
os.close(other)
is_held("the process has it", 0, 10)
os.close(os.open(here, os.O_RDWR))
ends("the process has closed a descriptor")
os.close(fd)
print("locks of open file descriptions end with them")
