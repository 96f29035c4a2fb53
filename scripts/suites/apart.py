"""What a process does first in namespaces of its own, of mounts, processes and the network."""

import fcntl, os, re, socket, struct, subprocess
from pathlib import Path


def collect_the_dead():
    """Goes on in a child. This process is the first one of its namespace, and the parent of all that have lost theirs."""
    work = os.fork()
    while work:
        process, status = os.wait()
        if process == work:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def loopback_up():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS: IFF_UP, IFF_RUNNING


def leave_mounts():
    """Takes the mounts of others out of this namespace: `ferry list` would show them, and they could not end as long as it lasts."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        target, kind = line.split()[4], line.split(" - ")[1].split()[0]
        if kind.startswith("fuse"):
            target = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), target)
            subprocess.run(["umount", "--lazy", "--internal-only", "--no-canonicalize", target], capture_output=True)
