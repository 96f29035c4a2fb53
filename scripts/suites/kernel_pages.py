"""Makes a daemon slow, and asks it for a sync of all while only the kernel has what was written.
usage: kernel_pages.py write MOUNTPOINT DAEMON_PID write|map   writes, syncs, kills the mount
       kernel_pages.py check MOUNTPOINT                        compares what is there"""

import ctypes
import fcntl
import mmap
import os
import pathlib
import resource
import signal
import sys
import threading
import time

from holders import holder_of

FILES = 400
SIZE = 16384
# ferry_fs::ioctl::SYNC, which `ferry sync` sends behind syncfs(2).
SYNC = ord("F") << 8 | 1
IOCTL = "16 "


def contents(number):
    return number.to_bytes(8, "little") * (SIZE // 8)


def write(mountpoint, daemon, way):
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES * 2 + 100, FILES * 2 + 100))
    directory = os.open(mountpoint, os.O_RDONLY)
    files = [os.open(f"{mountpoint}/{n}", os.O_RDWR | os.O_CREAT, 0o600) for n in range(FILES)]
    for file in files:
        os.ftruncate(file, SIZE)
    maps = [mmap.mmap(file, SIZE) for file in files] if way == "map" else []
    for number, file in enumerate(files):
        if maps:
            maps[number][:] = contents(number)
        else:
            os.pwrite(file, contents(number), 0)
    # Without the daemon the kernel can only queue what it writes back.
    os.kill(daemon, signal.SIGSTOP)
    syncing = []

    def sync():
        syncing.append(threading.get_native_id())
        ctypes.CDLL(None).syncfs(directory)
        fcntl.ioctl(directory, SYNC)

    thread = threading.Thread(target=sync)
    thread.start()
    # With cache=writeback syncfs waits for the times of files, so the daemon must go on before.
    end = time.monotonic() + 1
    while not syncing or not pathlib.Path(f"/proc/self/task/{syncing[0]}/syscall").read_text().startswith(IOCTL):
        if way == "write" and time.monotonic() > end:
            break
        time.sleep(0.01)
    os.kill(daemon, signal.SIGCONT)
    thread.join()
    # The holder would start another daemon.
    os.kill(holder_of(daemon), signal.SIGKILL)
    end = time.monotonic() + 10
    while pathlib.Path(f"/proc/{daemon}").exists() and time.monotonic() < end:
        time.sleep(0.01)


def check(mountpoint):
    lost = [n for n in range(FILES) if pathlib.Path(f"{mountpoint}/{n}").read_bytes() != contents(n)]
    if lost:
        sys.exit(f"{len(lost)} of {FILES} files lack what was synced, the first is {lost[0]}")


if sys.argv[1] == "write":
    write(sys.argv[2], int(sys.argv[3]), sys.argv[4])
else:
    check(sys.argv[2])
