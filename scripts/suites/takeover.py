#!/usr/bin/env python3
"""Two servers of a volume in a store take it from each other, while three clients work.

usage: takeover.py FERRY DIR ROUNDS [STORE [KIND...]]

STORE is made (a directory below DIR). In a bucket each server has locks of its own, as on a machine of its own: so
neither knows whether the other one is dead. In each round the server that has the volume is killed (`kill`) and started
again, stopped for a while (`stop`), or asked to release the volume (`release`). Three mounts know both servers. No
program may see an error; what was fsynced is there, what was answered is there, records that are counted under a
lock are counted once, and each client reads what another has written. At the end the volume is clean. It prints how
long the longest operation of each round took.
"""
import fcntl
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time

ferry, base, rounds = sys.argv[1], pathlib.Path(sys.argv[2]).absolute(), int(sys.argv[3])
store = sys.argv[4] if len(sys.argv) > 4 else f"dir://{base}/store"
kinds = sys.argv[5:] or ["kill", "release", "stop"]
base.mkdir(parents=True, exist_ok=True)
# A stopped server is stopped until the other one has the volume, and serves for so long.
SERVES = 3
# A server that has lost the volume says so in few lines, and not for each request.
ERRORS_MAX = 30
# The servers may take so long to be what they should be.
SETTLES = 60
failures, longest = [], {kind: [] for kind in kinds}
ended = threading.Event()


def run(*words, seconds=120):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=seconds)


def must(*words):
    done = run(*words)
    if done.returncode:
        sys.exit(f"FAILED {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    def __init__(self, name):
        self.name, self.address, self.process = name, f"127.0.0.1:{free_port()}", None

    def start(self):
        log = open(base / f"server-{self.name}", "a")
        serve = [ferry, "serve", store, "--standby", "--insecure", "--listen", self.address]
        if store.startswith("s3://"):
            locks = base / f"locks-{self.name}"
            locks.mkdir(exist_ok=True)
            serve = ["unshare", "--mount", "sh", "-c", f'mount --bind {locks} /var/lib/ferry && exec "$@"', "sh", *serve]
        self.process = subprocess.Popen(serve, stdout=log, stderr=subprocess.STDOUT)

    def role(self):
        said = [one for one in json.loads(run(ferry, "clients", "--json").stdout or "[]") if one["address"] == self.address]
        return said[0]["role"] if said else None


def active(among=None):
    """The server that has the volume, once one has it and the other one stands by; or once this one has it."""
    end = time.monotonic() + SETTLES
    while time.monotonic() < end:
        roles = {server.role(): server for server in ([among] if among else servers)}
        if "serves" in roles and (among or "stands by" in roles):
            return roles["serves"]
        time.sleep(0.05)
    failures.append(f"no server has the volume after {SETTLES} s: {[server.role() for server in servers]}")
    ended.set()
    return None


def worker(name, once):
    """Repeats a program until the end. Its errors are failures."""
    try:
        while not ended.is_set():
            once()
    except Exception as error:
        failures.append(f"{name}: {error!r}")
        ended.set()


class Client:
    """What the programs of one mount were told, and what must be there."""

    def __init__(self, number):
        self.number, self.mount = number, base / f"mnt{number}"
        self.mount.mkdir(exist_ok=True)
        self.synced, self.made, self.counted, self.took = 0, 0, 0, []
        servers_of = ",".join(server.address for server in servers)
        must(ferry, "mount", f"ferry://{servers_of}/", self.mount, "-o", f"insecure,log={base}/client{number}")

    def fsynced(self):
        """Lines of which each was fsynced before the next."""
        with open(self.mount / f"synced{self.number}", "ab", buffering=0) as file:
            for _ in range(20):
                file.write(f"{self.synced:09}\n".encode())
                os.fsync(file.fileno())
                self.synced += 1

    def answered(self):
        """Files that nobody syncs, some of which are renamed."""
        directory = self.mount / f"made{self.number}" / str(self.made // 500)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.made}.new"
        path.write_bytes(b"x" * (self.made % 5000))
        path.rename(directory / str(self.made))
        self.made += 1
        time.sleep(0.002)

    def locked(self):
        """Adds one to a number in a file that all clients change, under a lock."""
        with open(self.mount / "counter", "r+b", buffering=0) as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            number = int(file.read() or b"0")
            file.seek(0)
            file.write(b"%012d" % (number + 1))
            fcntl.lockf(file, fcntl.LOCK_UN)
        self.counted += 1
        time.sleep(0.01)

    def looks(self):
        """One small operation after the other, each with its time."""
        begun = time.monotonic()
        path = self.mount / f"probe{self.number}"
        path.write_bytes(b"x")
        os.stat(self.mount / f"made{(self.number + 1) % 3}")
        path.unlink()
        self.took.append((begun, time.monotonic() - begun))
        time.sleep(0.02)

    def programs(self):
        return [self.fsynced, self.answered, self.locked, self.looks]

    def lost(self, through):
        """What is missing, seen through another client."""
        lines = (through.mount / f"synced{self.number}").read_bytes().split()
        if [int(line) for line in lines[: self.synced]] != list(range(self.synced)):
            yield f"client {self.number}: of {self.synced} fsynced lines {len(lines)} are there, or in another order"
        for number in range(self.made):
            path = through.mount / f"made{self.number}" / str(number // 500) / str(number)
            if not path.exists() or path.stat().st_size != number % 5000:
                yield f"client {self.number}: file {number} of {self.made} is missing or not whole"
                return


must(ferry, "mkfs", store, "--size", "4G")
servers = [Server("a"), Server("b")]
for server in servers:
    server.start()
    time.sleep(1)
active()
clients = [Client(number) for number in range(3)]
for client in clients:
    (client.mount / f"made{client.number}").mkdir()
(clients[0].mount / "counter").write_bytes(b"0")
threads = [threading.Thread(target=worker, args=(f"{program.__name__} of client {client.number}", program))
           for client in clients for program in client.programs()]
for thread in threads:
    thread.start()
done = 0
for number in range(rounds):
    time.sleep(1)
    server = active()
    if ended.is_set():
        break
    kind, begun = kinds[number % len(kinds)], time.monotonic()
    if kind == "kill":
        server.process.kill()
        server.process.wait()
        # As systemd does.
        time.sleep(1)
        server.start()
    elif kind == "stop":
        server.process.send_signal(signal.SIGSTOP)
        active(among=next(other for other in servers if other is not server))
        time.sleep(SERVES)
        server.process.send_signal(signal.SIGCONT)
    else:
        released = run(ferry, "serve", "--release", store)
        if released.returncode:
            failures.append(f"release: {released.stderr.strip()}")
            break
    active()
    serves = time.monotonic()
    while not ended.is_set() and not all(client.took and client.took[-1][0] > serves for client in clients):
        time.sleep(0.05)
        if time.monotonic() > serves + SETTLES:
            failures.append(f"a client has not gone on {SETTLES} s after the other server has the volume")
            ended.set()
    over = [took for client in clients for at, took in list(client.took)
            if at + took >= begun]
    longest[kind].append(max(over, default=0.0))
    print(f"{kind} {longest[kind][-1]:.1f} s", flush=True)
    done += 1
ended.set()
for thread in threads:
    thread.join(200)
    if thread.is_alive():
        failures.append("a program hangs")
if not any(thread.is_alive() for thread in threads):
    for client in clients:
        failures += client.lost(clients[(client.number + 1) % 3])
    counted, told = int((clients[1].mount / "counter").read_bytes()), sum(client.counted for client in clients)
    if counted != told:
        failures.append(f"the counter is {counted}, and {told} times one was added")
    for client in clients:
        must(ferry, "umount", client.mount)
for server in servers:
    server.process.send_signal(signal.SIGCONT)
    server.process.terminate()
    server.process.wait(60)
for server in servers:
    errors = (base / f"server-{server.name}").read_text().count(" ERROR ")
    if errors > ERRORS_MAX * rounds:
        failures.append(f"server {server.name} has logged {errors} errors in {rounds} rounds")
# It reads all that the clients have written.
checked = run(ferry, "fsck", store, seconds=300 + 10 * rounds)
print(checked.stdout.strip())
if checked.returncode:
    failures.append(f"fsck: {checked.stderr.strip()}")
print(json.dumps({"fsynced lines": sum(c.synced for c in clients), "files": sum(c.made for c in clients),
                  "counted": sum(c.counted for c in clients)}))
for kind, times in longest.items():
    if times:
        ranked = sorted(times)
        print(f"{kind}: {len(ranked)} times, longest operation: median {statistics.median(ranked):.1f} s, most {ranked[-1]:.1f} s")
for failure in failures:
    print("FAILED", failure)
sys.exit(bool(failures) or done < rounds or any(not c.synced or not c.made or not c.counted for c in clients))
