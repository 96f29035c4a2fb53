#!/usr/bin/env python3
"""Three clients of one server behind slow, late and cut links; server and clients are killed; every byte and every answer is checked.

usage: checker.py SECONDS SEED FERRY RELAY DIRECTORY

Each client works in a directory of its own, against a model in this process: create, overwrite, append, rename, remove, fsync.
Another client looks at the result. All three share an append-only log, a counter below a lock, and an SQLite database. Two commit
to Git repositories. Meanwhile faults come at random: a link is limited, delayed, held up or cut, the server is stopped or killed, the third
client is killed.

What must hold:
* An operation that was answered without an error lasts, whatever becomes of links and servers, as long as its client lives.
* What a client has synced lasts although the client is killed.
* An operation fails only if the server was killed shortly before. Then its effect may be there or not.
* No operation takes longer than HANG_TIME_MAX.
* Two holders never have the lock at the same time, and the counter counts each increment.
"""

import errno
import fcntl
import hashlib
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

SECONDS, SEED, FERRY, RELAY, TOP = float(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
HANG_TIME_MAX = 150
# An operation may fail for so long after the server was killed: its client has to come back first.
CRASH_TIME_MAX = 60
FILES_MAX = 60
VOLUME = f"{TOP}/checker.ferry"
begun = time.monotonic()
over = threading.Event()
problems, counts = [], {}
counting = threading.Lock()


def count(what):
    with counting:
        counts[what] = counts.get(what, 0) + 1


def problem(what):
    """The first is what matters: it ends the run."""
    with counting:
        problems.append(f"{time.monotonic() - begun:.1f} s: {what}")
    over.set()


def say(what):
    print(f"{time.monotonic() - begun:7.1f} s  {what}", flush=True)


def run(*command, timeout=HANG_TIME_MAX, **more):
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False, **more)


def free_port():
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        return it.getsockname()[1]


def listens(port):
    """Waits until somebody does."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with socket.socket() as it:
            if it.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError(f"nobody listens at port {port} after 60 s")


class Server:
    """`ferry serve`, and when it was killed last."""

    def __init__(self):
        self.port, self.process, self.killed = free_port(), None, -1e9
        self.log = open(f"{TOP}/server.log", "ab")

    def start(self):
        command = [FERRY, "serve", VOLUME, "--listen", f"127.0.0.1:{self.port}", "--grace", "10s", "--insecure"]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        listens(self.port)

    def stop(self, how):
        if how == signal.SIGKILL:
            self.killed = time.monotonic()
        self.process.send_signal(how)
        self.process.wait(HANG_TIME_MAX)
        if how == signal.SIGKILL:
            self.killed = time.monotonic()

    def crashed_lately(self):
        return time.monotonic() - self.killed < CRASH_TIME_MAX


class Link:
    """A relay between one client and the server."""

    def __init__(self, server, name):
        self.port = free_port()
        log = open(f"{TOP}/relay.{name}.log", "ab")
        command = [RELAY, "--listen", f"127.0.0.1:{self.port}", "--to", f"127.0.0.1:{server.port}"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True)
        listens(self.port)

    def tell(self, *lines):
        for line in lines:
            self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def heal(self):
        self.tell("up unlimited", "down unlimited", "delay 0us", "release up", "release down", "accept")

    def stop(self):
        self.process.kill()
        self.process.wait()


class Client:
    """A mount, the directory that is its own, and what must be in there."""

    def __init__(self, server, name, mortal):
        self.server, self.name, self.mortal = server, name, mortal
        self.link, self.mount = Link(server, name), f"{TOP}/{name}"
        self.own = f"own-{name}"
        self.files, self.synced, self.touched = {}, {}, set()
        self.turn = threading.Lock()
        self.lives, self.life = True, 0

    def start(self):
        os.makedirs(self.mount, exist_ok=True)
        said = run(FERRY, "mount", f"ferry://127.0.0.1:{self.link.port}/", self.mount, "-o", f"insecure,log={TOP}/client.{self.name}.log")
        if said.returncode:
            raise RuntimeError(f"{self.name} cannot mount: {said.stderr}")
        self.lives, self.life = True, self.life + 1

    def kill(self):
        """As if its machine lost power: what it had not synced may be gone."""
        with open(f"{TOP}/client.{self.name}.log", "a", encoding="utf-8") as log:
            log.write("killed\n")
        self.lives = False
        for pid in daemons_of(self.mount):
            os.kill(pid, signal.SIGKILL)
        run("umount", "-l", self.mount)

    def path(self, name):
        return f"{self.mount}/{self.own}/{name}"


def daemons_of(mountpoint):
    """The daemons of a mount: their command lines name it."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as line:
                words = line.read().split(b"\0")
        except OSError:
            continue
        if b"mount" in words and os.fsencode(mountpoint) in words and os.path.basename(words[0]).startswith(b"ferry"):
            found.append(int(pid))
    return found


def data_of(key, size):
    """The bytes of one version of one file."""
    return random.Random(key).randbytes(size)


waiting = {}  # what each thread waits for, and since when


@contextmanager
def bounded(what):
    me = threading.get_ident()
    waiting[me] = what, time.monotonic()
    try:
        yield
    finally:
        del waiting[me]


def watch():
    while not over.wait(1):
        for what, since in list(waiting.values()):
            if time.monotonic() - since > HANG_TIME_MAX:
                problem(f"{what} takes more than {HANG_TIME_MAX} s")


def may_fail(client, life, error):
    """Whether an operation of this client may have failed now."""
    if client.mortal and (not client.lives or client.life != life):
        return True
    code = getattr(error, "errno", None)
    return client.server.crashed_lately() and code in (errno.EIO, None)


class Files:
    """Operations in a client's own directory, against the model."""

    def __init__(self, client, others, chance):
        self.client, self.others, self.chance, self.version = client, others, chance, 0
        self.new_name = None

    def new_data(self, most):
        self.version += 1
        size = int(2 ** self.chance.uniform(0, most))
        return data_of(f"{self.client.name}.{self.client.life}.{self.version}", size)

    def step(self):
        client = self.client
        with client.turn:
            life, name = client.life, f"f{self.chance.randrange(FILES_MAX)}"
            if not client.lives:
                over.wait(0.1)
                return
            # The directory to which `mv` moves it.
            self.new_name = None
            op = self.chance.choice(["create", "create", "create", "over", "append", "mv", "mv", "rm", "look", "look", "other", "other", "fsync", "sync"])
            try:
                with bounded(f"{op} of {name} at {client.name}"):
                    getattr(self, op)(name)
                count(op)
            except OSError as error:
                if not may_fail(client, life, error):
                    return problem(f"{op} of {name} at {client.name} failed without a reason: {error!r}")
                count("failed")
                self.forget(name, life)

    def forget(self, name, life):
        """An operation failed: what it touched is removed, and begins anew."""
        for each in {name, self.new_name} - {None}:
            self.client.files.pop(each, None)
            self.client.touched.add(each)
            for _ in range(20):
                try:
                    os.unlink(self.client.path(each))
                    break
                except FileNotFoundError:
                    break
                except OSError as error:
                    if self.client.life != life or not self.client.lives:
                        return
                    if not may_fail(self.client, life, error):
                        return problem(f"{each} at {self.client.name} cannot be removed: {error!r}")
                    time.sleep(0.5)

    def put(self, name, data, how, offset=None):
        self.client.touched.add(name)
        fd = os.open(self.client.path(name), how | os.O_WRONLY, 0o644)
        try:
            at = 0
            while at < len(data):
                piece = data[at : at + (1 << 17)]
                at += os.write(fd, piece) if offset is None else os.pwrite(fd, piece, offset + at)
            if self.chance.random() < 0.05:
                os.fsync(fd)
        finally:
            os.close(fd)

    def create(self, name):
        data = self.new_data(21 if self.chance.random() < 0.9 else 23.5)
        self.put(name, data, os.O_CREAT | os.O_TRUNC)
        self.client.files[name] = data

    def over(self, name):
        old = self.client.files.get(name)
        if old is None:
            return
        data, offset = self.new_data(16), self.chance.randrange(len(old) + 1)
        self.put(name, data, 0, offset)
        self.client.files[name] = old[:offset] + data + old[offset + len(data) :]

    def append(self, name):
        old = self.client.files.get(name)
        if old is None:
            return
        # One write: a server that is killed may leave a part of several.
        data = self.new_data(16)
        self.put(name, data, os.O_APPEND)
        self.client.files[name] = old + data

    def mv(self, name):
        if name not in self.client.files:
            return
        self.new_name = f"f{self.chance.randrange(FILES_MAX)}"
        if self.new_name != name:
            self.client.touched |= {name, self.new_name}
            os.rename(self.client.path(name), self.client.path(self.new_name))
            self.client.files[self.new_name] = self.client.files.pop(name)

    def rm(self, name):
        if name in self.client.files:
            self.client.touched.add(name)
            os.unlink(self.client.path(name))
            del self.client.files[name]

    def fsync(self, name):
        if name in self.client.files:
            fd = os.open(self.client.path(name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def sync(self, _name):
        client, life = self.client, self.client.life
        said = run(FERRY, "sync", client.mount)
        if client.life != life or not client.lives:
            return
        if said.returncode == 0:
            client.synced, client.touched = dict(client.files), set()
        elif not client.server.crashed_lately():
            problem(f"ferry sync at {client.name} failed without a reason: {said.stderr}")

    def look(self, name):
        compare(self.client, self.client, name)

    def other(self, name):
        """What another client sees of it."""
        other = self.chance.choice(self.others)
        life = other.life
        try:
            compare(self.client, other, name)
        except OSError as error:
            if not may_fail(other, life, error):
                raise


def compare(client, at, name):
    """A file of a client as the client at another mount, or its own, sees it; nothing is said of a mount that dies meanwhile."""
    life = at.life
    difference = differs(client.files.get(name), f"{at.mount}/{client.own}/{name}")
    if difference and at.lives and at.life == life:
        problem(difference)


def differs(wanted, path):
    """How a file is not what it should be: these bytes, or absent."""
    try:
        if wanted is not None and (size := os.stat(path).st_size) != len(wanted):
            return f"{path} has {size} bytes, not {len(wanted)}"
        with open(path, "rb") as file:
            found = file.read()
    except FileNotFoundError:
        found = None
    if found == wanted:
        return None
    if found is None:
        return f"{path} is not there"
    if wanted is None:
        return f"{path} is there, and should not be"
    first = next((i for i, (a, b) in enumerate(zip(found, wanted)) if a != b), min(len(found), len(wanted)))
    zeros = ", zeros" if not found[first : first + 4096].strip(b"\0") else ""
    return f"{path} differs: {len(found)} bytes, {len(wanted)} wanted, first at {first}{zeros}"


class Shared:
    """Appends to one log, and a counter below a lock, by all clients."""

    def __init__(self, clients):
        self.lines = {client.name: [] for client in clients}
        self.holder, self.certain, self.maybe = None, 0, 0
        self.number = {client.name: 0 for client in clients}

    def append(self, client):
        life = client.life
        self.number[client.name] += 1
        line = f"{client.name} {self.number[client.name]} " + hashlib.md5(f"{client.name}{self.number[client.name]}".encode()).hexdigest() + "\n"
        try:
            with bounded(f"an append to the log at {client.name}"):
                fd = os.open(f"{client.mount}/shared/log", os.O_WRONLY | os.O_APPEND)
                try:
                    os.write(fd, line.encode())
                    if client.mortal:
                        os.fsync(fd)
                finally:
                    os.close(fd)
            if client.lives and client.life == life:
                self.lines[client.name].append(line)
            count("log")
        except OSError as error:
            if not may_fail(client, life, error):
                problem(f"an append to the log at {client.name} failed without a reason: {error!r}")
            count("log failed")

    def increment(self, client, posix):
        life, taken = client.life, False
        try:
            with bounded(f"an increment at {client.name}"):
                fd = os.open(f"{client.mount}/shared/counter", os.O_RDWR)
                try:
                    (fcntl.lockf if posix else fcntl.flock)(fd, fcntl.LOCK_EX)
                    if not (client.lives and client.life == life):
                        return
                    if self.holder is not None:
                        return problem(f"{client.name} and {self.holder} have the lock")
                    self.holder, taken = client.name, True
                    value = int(os.pread(fd, 20, 0) or b"0")
                    self.maybe += 1
                    os.pwrite(fd, b"%020d" % (value + 1), 0)
                    os.fsync(fd)
                    self.maybe -= 1
                    self.certain += 1
                    self.holder, taken = None, False
                    count("increment")
                finally:
                    if taken and self.holder == client.name:
                        self.holder = None
                    os.close(fd)
        except (OSError, ValueError) as error:
            if not may_fail(client, life, error):
                problem(f"an increment at {client.name} failed without a reason: {error!r}")
            count("increment failed")

    def verify(self, mount):
        with open(f"{mount}/shared/log", encoding="ascii", errors="replace") as log:
            there = log.readlines()
        seen = set(there)
        if len(seen) != len(there):
            problem(f"{len(there) - len(seen)} lines of the log are there twice")
        for name, lines in self.lines.items():
            lost = [line for line in lines if line not in seen]
            if lost:
                problem(f"{len(lost)} lines that {name} appended are lost, the first {lost[0].strip()}")
            order = [int(line.split()[1]) for line in there if line.startswith(name + " ")]
            if order != sorted(order):
                problem(f"the lines of {name} are out of order")
        for line in there:
            name, number, digest = (line.split() + ["", "", ""])[:3]
            if hashlib.md5(f"{name}{number}".encode()).hexdigest() != digest:
                problem(f"the log has a line that nobody wrote: {line!r}")
        with open(f"{mount}/shared/counter", "rb") as counter:
            value = int(counter.read() or b"0")
        if not self.certain <= value <= self.certain + self.maybe:
            problem(f"the counter is {value}, not {self.certain} to {self.certain + self.maybe}")
        say(f"{len(there)} lines, counter {value}")


class Database:
    """Rows that all clients insert, each in a transaction of its own."""

    def __init__(self):
        self.rows, self.number, self.turn = set(), 0, threading.Lock()

    def insert(self, client):
        life = client.life
        with self.turn:
            self.number += 1
            row = self.number
        try:
            with bounded(f"a transaction at {client.name}"):
                db = sqlite3.connect(f"{client.mount}/shared/db", timeout=20, isolation_level=None)
                try:
                    db.execute("BEGIN IMMEDIATE")
                    db.execute("INSERT INTO rows VALUES (?, ?, ?)", (row, client.name, data_of(str(row), 300)))
                    db.execute("COMMIT")
                finally:
                    db.close()
            with self.turn:
                self.rows.add(row)
            count("transaction")
        except (sqlite3.Error, OSError) as error:
            text = str(error)
            busy = "locked" in text
            if not busy and not may_fail(client, life, error):
                problem(f"a transaction at {client.name} failed without a reason: {error!r}")
            count("transaction busy" if busy else "transaction failed")

    def verify(self, mount):
        # A client that was killed has its locks until its session's life is over.
        db = sqlite3.connect(f"{mount}/shared/db", timeout=HANG_TIME_MAX)
        whole = db.execute("PRAGMA integrity_check").fetchone()[0]
        there = {row: data for row, data in db.execute("SELECT id, data FROM rows")}
        db.close()
        if whole != "ok":
            problem(f"the database is damaged: {whole}")
        if lost := self.rows - set(there):
            problem(f"{len(lost)} committed rows are lost, the first {min(lost)}")
        for row, data in there.items():
            if data != data_of(str(row), 300):
                problem(f"row {row} is not what was inserted")
        say(f"{len(there)} rows")


class Git:
    """Commits to a repository of the client's own."""

    def __init__(self, client, chance):
        self.client, self.chance, self.head, self.number = client, chance, None, 0
        self.at = client.path("git")

    def git(self, *words):
        with bounded(f"git {words[0]} at {self.client.name}"):
            return run("git", "-C", self.at, "-c", "user.name=t", "-c", "user.email=t", "-c", "gc.auto=0", *words)

    def commit(self):
        self.number += 1
        try:
            if self.head is None and not os.path.isdir(f"{self.at}/.git"):
                os.makedirs(self.at, exist_ok=True)
                if self.git("init", "-q").returncode:
                    raise OSError(errno.EIO, "git init")
            for each in range(5):
                with open(f"{self.at}/{self.chance.randrange(40)}", "wb") as file:
                    file.write(data_of(f"git {self.number} {each}", self.chance.randrange(20000)))
            for words in (("add", "."), ("commit", "-qm", str(self.number))):
                said = self.git(*words)
                if said.returncode:
                    raise OSError(errno.EIO, said.stderr)
            self.head = self.git("rev-parse", "HEAD").stdout.strip() or self.head
            count("commit")
        except OSError as error:
            if not may_fail(self.client, self.client.life, error):
                problem(f"git at {self.client.name} failed without a reason: {error!r}")
            count("commit failed")
            for lock in ("index.lock", "HEAD.lock", "refs/heads/master.lock"):
                try:
                    os.unlink(f"{self.at}/.git/{lock}")
                except OSError:
                    pass

    def verify(self):
        if self.head is None:
            return
        said = self.git("fsck", "--strict", "--no-dangling")
        if said.returncode:
            problem(f"git fsck at {self.client.name}: {said.stdout}{said.stderr}")
        if self.head not in self.git("rev-list", "HEAD").stdout.split():
            problem(f"the commit {self.head} of {self.client.name} is lost")


def loop(*steps):
    while not over.is_set():
        for step in steps:
            try:
                step()
            except Exception as error:  # what nobody thought of is a problem, too
                problem(f"{step}: {error!r}")


def faults(chance, server, clients):
    while not over.wait(chance.uniform(1, 5)):
        client = chance.choice(clients)
        what = chance.choice(["limit", "limit", "limit", "delay", "cut", "cut", "hold", "refuse", "stop", "kill", "kill client"])
        seconds = chance.uniform(0.3, 4)
        if what == "limit":
            # Long enough, at times, that data of many seconds is on its way.
            rate, ways = chance.choice(["1Mbit", "4Mbit", "10Mbit", "100Mbit"]), chance.choice([("up",), ("down",), ("up", "down")])
            seconds *= chance.choice([1, 5])
            say(f"{client.name}: {' and '.join(ways)} {rate} for {seconds:.1f} s")
            client.link.tell(*(f"{way} {rate}" for way in ways))
            over.wait(seconds)
        elif what == "delay":
            say(f"{client.name}: delay for {seconds:.1f} s")
            client.link.tell(f"delay {chance.choice([1, 20, 100])}ms")
            over.wait(seconds)
        elif what == "cut":
            say(f"{client.name}: cut")
            client.link.tell("cut")
        elif what == "hold":
            ways = chance.choice([("up",), ("down",), ("up", "down")])
            say(f"{client.name}: nothing passes {' and '.join(ways)} for {seconds:.1f} s")
            client.link.tell(*(f"hold {way}" for way in ways))
            over.wait(seconds)
        elif what == "refuse":
            say(f"{client.name}: cut off for {seconds:.1f} s")
            client.link.tell("refuse", "cut")
            over.wait(seconds)
        elif what in ("stop", "kill"):
            say(f"the server: {what}")
            server.stop(signal.SIGTERM if what == "stop" else signal.SIGKILL)
            over.wait(chance.uniform(0, 1))
            server.start()
        elif client.mortal:
            say(f"{client.name}: killed")
            client.kill()
            client.link.heal()
            with client.turn:
                client.start()
                after_kill(client)
        client.link.heal()
        count(what)


def after_kill(client):
    """What it had synced, and not touched since, is there; it goes on with an empty directory."""
    with bounded(f"looking at {client.name} after it was killed"):
        kept = {name: data for name, data in client.synced.items() if name not in client.touched}
        client.files = kept
        for name in kept:
            compare(client, client, name)
        for name in os.listdir(client.path("")):
            os.unlink(client.path(name))
    client.files, client.synced, client.touched = {}, {}, set()


def main():
    chance = random.Random(SEED)
    os.makedirs(TOP, exist_ok=True)
    made = run(FERRY, "mkfs", VOLUME)
    if made.returncode:
        sys.exit(made.stderr)
    server = Server()
    server.start()
    clients = [Client(server, name, name == "c") for name in "abc"]
    threads = []
    try:
        for client in clients:
            client.start()
            os.mkdir(f"{client.mount}/{client.own}")
        first = clients[0]
        os.mkdir(f"{first.mount}/shared")
        for name in ("log", "counter"):
            os.close(os.open(f"{first.mount}/shared/{name}", os.O_CREAT | os.O_WRONLY, 0o644))
        db = sqlite3.connect(f"{first.mount}/shared/db")
        db.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, client TEXT, data BLOB)")
        db.commit()
        db.close()
        for client in clients:
            if (said := run(FERRY, "sync", client.mount)).returncode:
                sys.exit(f"a sync of a new volume failed: {said.stderr}")
        shared, database = Shared(clients), Database()
        gits = [Git(client, random.Random(f"{SEED} git {client.name}")) for client in clients if not client.mortal]
        threads.append(threading.Thread(target=watch, daemon=True))
        for client in clients:
            own = Files(client, [other for other in clients if other is not client], random.Random(f"{SEED} {client.name}"))
            odd = random.Random(f"{SEED} shared {client.name}")

            def together(client=client, odd=odd):
                if not client.lives:
                    return time.sleep(0.1)
                [lambda: shared.append(client), lambda: shared.increment(client, False), lambda: database.insert(client)][odd.randrange(3)]()
                time.sleep(odd.uniform(0, 0.2))

            threads.append(threading.Thread(target=loop, args=(own.step,), daemon=True))
            threads.append(threading.Thread(target=loop, args=(together,), daemon=True))
        for git in gits:
            threads.append(threading.Thread(target=loop, args=(git.commit, lambda: over.wait(1)), daemon=True))
        threads.append(threading.Thread(target=loop, args=(lambda: faults(chance, server, clients),), daemon=True))
        for thread in threads:
            thread.start()
        over.wait(SECONDS)
        over.set()
        until = time.monotonic() + HANG_TIME_MAX
        for thread in threads:
            thread.join(max(0, until - time.monotonic()))
            if thread.is_alive():
                problem(f"a thread does not end: {list(waiting.values())}")
        if not problems:
            verify(server, clients, shared, database, gits)
    finally:
        end(server, clients)
    say(", ".join(f"{what} {number}" for what, number in sorted(counts.items())))
    for each in problems[:10]:
        print(each)
    if problems:
        sys.exit(f"seed {SEED}: {len(problems)} problems")
    for what in ("create", "log", "increment", "transaction", "other"):
        if counts.get(what, 0) < SECONDS / 10:
            sys.exit(f"too little was tried: {what} {counts.get(what, 0)}")


def verify(server, clients, shared, database, gits):
    """Everything, at each client, and once more on the volume when all have gone."""
    say("verifying")
    for client in clients:
        for at in clients:
            for name in client.files:
                compare(client, at, name)
            there = set(os.listdir(f"{at.mount}/{client.own}")) - {"git"}
            if there != set(client.files):
                problem(f"{client.own} at {at.name}: {there ^ set(client.files)} should not be there, or should")
    shared.verify(clients[0].mount)
    database.verify(clients[1].mount)
    for git in gits:
        git.verify()
    for client in clients:
        said = run(FERRY, "umount", client.mount)
        if said.returncode and not server.crashed_lately():
            problem(f"{client.name}: {said.stderr}")
    server.stop(signal.SIGTERM)
    checked = run(FERRY, "fsck", VOLUME)
    if checked.returncode:
        problem(f"fsck: {checked.stdout}{checked.stderr}")
    local = f"{TOP}/local"
    os.makedirs(local, exist_ok=True)
    if (said := run(FERRY, "mount", VOLUME, local)).returncode:
        return problem(f"the volume cannot be mounted: {said.stderr}")
    for client in clients:
        mount, client.mount = client.mount, local
        for name in client.files:
            compare(client, client, name)
        client.mount = mount
    shared.verify(local)
    if (said := run(FERRY, "umount", local)).returncode:
        problem(f"the volume cannot be unmounted: {said.stderr}")


def end(server, clients):
    """Nothing of it is left running or mounted."""
    for client in clients:
        run(FERRY, "umount", "--force", client.mount)
        for pid in daemons_of(client.mount):
            os.kill(pid, signal.SIGKILL)
        run("umount", "-l", client.mount)
        client.link.stop()
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait()


main()
