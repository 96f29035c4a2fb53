#!/usr/bin/env python3
"""Real programs work on a mount while other processes go on with it again and again.

usage: go_on.py FERRY DIR SECONDS [PAUSE [VOLUME]]
       go_on.py FERRY DIR SECONDS PAUSE killed [VOLUME|served]

With `killed` the daemon is killed instead. More programs check that all that they have synced is there, in files that are
open all the time and in databases of sqlite3 and PostgreSQL, and that nothing is made twice. A mount of a volume in a
file, or of a server (`killed served`), loses nothing, and no program may see an error. With a VOLUME in a store,
programs may see EIO, ESTALE and ENOENT, and what they did not sync may be lost; so the programs are others: some only make
errors likely and are begun anew.

fio with verification, git, sqlite3 with a WAL, make, and programs that sync work in a mount below DIR; so do
fsx, pjdfstest, PostgreSQL and cargo if they are there and SECONDS are 60 or more. VOLUME is made; it may be in a
store, or `served`: then the mount is one of a server on this machine. `ferry upgrade-mount` is called every PAUSE seconds (0.5). No program may see an error; at the end the
volume is clean. It prints how often, and how long programs waited: the longest time of one small operation
around each change, and what the command says.
"""
import errno
import json
import os
import pathlib
import re
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time

ferry, base, seconds = sys.argv[1], pathlib.Path(sys.argv[2]).absolute(), float(sys.argv[3])
pause = float(sys.argv[4]) if len(sys.argv) > 4 else 0.5
mount, log = base / "mnt", base / "log"
where = sys.argv[5] if len(sys.argv) > 5 else None
is_killed = where == "killed"
if is_killed:
    where = sys.argv[6] if len(sys.argv) > 6 else None
is_served = where == "served"
# What was not synced may be lost: in a store.
may_lose = is_killed and where is not None and not is_served
is_checked = is_killed and not is_served
volume = where if where and not is_served else base / "volume.ferry"
suites = pathlib.Path(__file__).resolve().parent
tools = pathlib.Path(os.environ.get("FERRY_TOOLS", suites.parent.parent / "target/tools")) / "bin"
end = time.monotonic() + seconds
failures = []
rounds = {}


def run(*words, **more):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=300, **more)


def must(*words, **more):
    done = run(*words, **more)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return done.stdout


lost = {}
prepared = threading.Semaphore(0)


def is_lost(error):
    """Whether it tells of changes that were not synced."""
    if isinstance(error, OSError):
        # The last one: a program whose contents were not written back.
        return error.errno in (errno.EIO, errno.ESTALE, errno.ENOENT, errno.ENOEXEC)
    # A program of its own: it may say anything but that the mount has gone away.
    return not re.search("not connected|connection abort", str(error))


def again(name, once):
    """Calls `once` with a new directory until the time is over."""
    count = 0
    while time.monotonic() < end and not failures:
        work = mount / name / str(count)
        work.mkdir(parents=True)
        try:
            once(work)
        except Exception as error:
            if may_lose and is_lost(error):
                lost[name] = lost.get(name, 0) + 1
                count += 1
                continue
            failures.append(f"{name}: {error}")
            return
        shutil.rmtree(work, ignore_errors=may_lose)
        count += 1
        rounds[name] = count


def git(work):
    env = dict(os.environ, GIT_CONFIG_NOSYSTEM="1", HOME=str(work), GIT_AUTHOR_NAME="a", GIT_AUTHOR_EMAIL="a@a",
               GIT_COMMITTER_NAME="a", GIT_COMMITTER_EMAIL="a@a")
    must("git", "init", "-q", work, env=env)
    for number in range(30):
        (work / f"file{number % 7}").write_text(f"{number}\n" * 200)
        must("git", "-C", work, "add", "-A", env=env)
        must("git", "-C", work, "commit", "-qm", str(number), env=env)
    must("git", "-C", work, "gc", "-q", env=env)
    must("git", "-C", work, "fsck", "--strict", env=env)
    if must("git", "-C", work, "rev-list", "--count", "HEAD", env=env).strip() != "30":
        raise RuntimeError("commits are missing")


def sqlite(work):
    base = work / "base"
    text = "pragma journal_mode=wal; create table t(n integer primary key, x text);"
    must("sqlite3", base, text)
    for number in range(20):
        rows = ",".join(f"({number * 50 + row},'{'x' * 300}')" for row in range(50))
        must("sqlite3", base, f"pragma synchronous=full; insert into t values {rows};")
    answer = must("sqlite3", base, "pragma integrity_check; select count(*) from t;")
    if answer.split() != ["ok", "1000"]:
        raise RuntimeError(answer)


def make(work):
    rules = ["all: prog"]
    for number in range(40):
        (work / f"f{number}.c").write_text(f"int f{number}(void) {{ return {number}; }}\n")
    (work / "main.c").write_text("int main(void) { return 0; }\n")
    objects = " ".join(f"f{number}.o" for number in range(40))
    rules += [f"prog: main.o {objects}\n\tcc -o prog main.o {objects}"]
    (work / "Makefile").write_text("\n".join(rules) + "\n")
    must("make", "-s", "-j2", "-C", work)
    must(work / "prog")


def fio(work):
    must("fio", "--name=verify", f"--directory={work}", "--rw=randrw", "--bs=4k-64k", "--size=16m", "--verify=crc32c",
         "--verify_fatal=1", "--fsync=32", "--time_based=0", "--output-format=json", cwd=base)


def mapped(work):
    """Stores to a mapping, and what a new descriptor reads."""
    import mmap
    path = work / "mapped"
    with open(path, "wb", buffering=0) as file:
        file.write(bytes(1 << 20))
        if may_lose:
            os.fsync(file.fileno())
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 1 << 20) as memory:
        for number in range(200):
            at = number * 5003 % (1 << 20)
            memory[at] = number % 251
            if number % 20 == 0:
                memory.flush()
            time.sleep(0.005)
        memory.flush()
        expected = memory[:]
    if path.read_bytes() != expected:
        raise RuntimeError("a mapping and a read differ")


def fsx(work):
    """Fewer operations than one change takes, so that each run begins and ends at another moment."""
    must(tools / "fsx", "-f", suites / "fsx.toml", "-N", "2000", "-S", str(rounds.get("fsx", 0)), "-P", base, work / "fsx")


def pjdfstest(work):
    config, other = base / "pjdfstest.toml", base / "other"
    text = (suites / "pjdfstest.toml").read_text()
    config.write_text(re.sub("^allow_remount = .*", "allow_remount = false", text, flags=re.M))
    other.mkdir(exist_ok=True)
    said = run(tools / "pjdfstest", "-p", work, "-s", other, "-c", config).stdout
    said = re.sub("\x1b\\[[0-9;]*m", "", said)
    failed = [name for name, result in re.findall("^(\\S+::\\S+) +(\\S+)$", said, re.M) if result not in ("ok", "skipped")]
    # What is mounted on a directory of the mount is unmounted by the kernel at a kill.
    if [name for name in failed if not (is_killed and "::ebusy" in name)] or "Summary:" not in said:
        raise RuntimeError(f"{failed} {said[-2000:]}")


def postgres_programs():
    return sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin"))


def postgres(work):
    """pgbench, and the books balance."""
    data, sockets, programs = work / "data", base / "pg", postgres_programs()[-1]
    for directory in (data, sockets):
        directory.mkdir(mode=0o700, exist_ok=True)
        shutil.chown(directory, "postgres", "postgres")
    for directory in (base, mount, work.parent, work):
        directory.chmod(0o755)

    def does(*words):
        return must("setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups", "--", "env",
                    f"PGHOST={sockets}", programs / words[0], *words[1:], cwd="/")

    control = ("pg_ctl", "-s", "-w", "-D", data, "-l", sockets / "log")
    does("initdb", "-D", data, "--no-instructions")
    does(*control, "-o", f"-k {sockets} -c listen_addresses=''", "start")
    does("pgbench", "-q", "-i", "-s", "2", "postgres")
    does("pgbench", "-c", "4", "-j", "2", "-T", "15", "postgres")
    sums = does("psql", "-XAt", "postgres", "-c", "select sum(abalance) from pgbench_accounts union all "
                "select sum(tbalance) from pgbench_tellers union all select sum(bbalance) from pgbench_branches "
                "union all select sum(delta) from pgbench_history")
    if len(set(sums.split())) != 1 or len(sums.split()) != 4:
        raise RuntimeError(f"the books do not balance: {sums}")
    does(*control, "-m", "fast", "stop")
    if re.search("PANIC|could not|checksum", (sockets / "log").read_text()):
        raise RuntimeError((sockets / "log").read_text()[-2000:])


def cargo(work):
    must("cargo", "new", "-q", "--vcs", "none", work / "program")
    modules = [f"pub fn f{number}(x: u64) -> u64 {{ x.wrapping_mul({number} + 3) }}\n" for number in range(30)]
    for number, text in enumerate(modules):
        (work / f"program/src/m{number}.rs").write_text(text)
    calls = " + ".join(f"m{number}::f{number}(1)" for number in range(30))
    uses = "".join(f"mod m{number};\n" for number in range(30))
    (work / "program/src/main.rs").write_text(f"{uses}fn main() {{ println!(\"{{}}\", {calls}); }}\n")
    program = work / "program"
    must("cargo", "build", "-q", "--offline", "--manifest-path", program / "Cargo.toml", "--target-dir", program / "target")
    if must(program / "target/debug/program").strip() != str(sum(number + 3 for number in range(30))):
        raise RuntimeError("the program that was built is wrong")


def keeps_open():
    """Files that are open all the time: one has a name, one has none, one is locked."""
    import fcntl
    named = open(mount / "named", "w+b", buffering=0)
    removed = open(mount / "removed", "w+b", buffering=0)
    removed.write(b"contents")
    os.unlink(mount / "removed")
    fcntl.flock(named, fcntl.LOCK_EX)
    count = 0
    try:
        while time.monotonic() < end and not failures:
            named.write(b"%07d\n" % count)
            if count % 50 == 0:
                os.fsync(named.fileno())
            if os.pread(removed.fileno(), 8, 0) != b"contents":
                raise RuntimeError("a removed file has lost its contents")
            count += 1
            time.sleep(0.002)
        lines = pathlib.Path(mount / "named").read_bytes()
        if lines != b"".join(b"%07d\n" % number for number in range(count)):
            raise RuntimeError("lines are missing")
    except Exception as error:
        failures.append(f"open files: {error}")
    rounds["lines"] = count


def sync_directory(path):
    """fsync of a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tree(work):
    """Makes, moves and removes files, and syncs none."""
    for number in range(300):
        path = work / f"{number % 50}"
        path.write_bytes(bytes(1 + number * 977 % 50000))
        path.rename(work / f"moved-{number % 50}")
        if number % 3:
            (work / f"moved-{number % 50}").unlink()
        os.listdir(work)


def synced():
    """What was synced with its directory is there, whatever is killed."""
    directory, count, kept = mount / "synced", 0, {}
    directory.mkdir()
    sync_directory(mount)
    prepared.release()
    while time.monotonic() < end and not failures:
        count += 1
        path, contents = directory / str(count), os.urandom(1 + count * 7919 % 100000)
        try:
            with open(path, "xb", buffering=0) as file:
                file.write(contents)
                os.fsync(file.fileno())
            sync_directory(directory)
            kept[path] = contents
        except OSError as error:
            if not is_lost(error):
                failures.append(f"synced: {error}")
        if count % 50 == 0:
            failures.extend(f"{path} was synced" for path, all_of in kept.items() if path.read_bytes() != all_of)
    failures.extend(f"{path} was synced" for path, all_of in kept.items() if path.read_bytes() != all_of)
    rounds["synced"] = len(kept)


def database():
    """What sqlite3 says is committed is there. (With `full` the removal of its journal may be lost, and so the commit.)"""
    path, count, sure, unsure = mount / "database", 0, set(), set()
    must("sqlite3", path, "pragma synchronous=extra; create table t(n integer primary key);")
    sync_directory(mount)
    prepared.release()
    while time.monotonic() < end and not failures:
        count += 1
        done = run("sqlite3", path, f"pragma synchronous=extra; insert into t values({count});")
        (unsure if done.returncode else sure).add(count)
        if done.returncode and not re.search("disk I/O|malformed|unable to open", done.stderr):
            failures.append(f"sqlite3: {done.stderr}")
    said = must("sqlite3", path, "pragma integrity_check; select n from t;").split()
    there = set(map(int, said[1:]))
    if said[0] != "ok" or not sure <= there or not there <= sure | unsure:
        failures.append(f"sqlite3: {said[0]}, {len(sure - there)} of {len(sure)} commits are missing")
    rounds["database"] = len(sure)
    lost["database"] = len(unsure)


def made_once():
    """What nobody has made is not there yet, also if the process that makes it is killed."""
    directory, number = mount / "made once", 0
    directory.mkdir()
    sync_directory(mount)
    while time.monotonic() < end and not failures:
        number += 1
        try:
            if number % 2:
                os.close(os.open(directory / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            else:
                (directory / str(number)).mkdir()
            if number > 50:
                old = directory / str(number - 50)
                old.rmdir() if number % 2 == 0 else old.unlink()
        except OSError as error:
            if not is_lost(error):
                failures.append(f"made once: {error}")
        if number % 8 == 0:
            time.sleep(0.001)
    rounds["made once"] = number


def committed():
    """What PostgreSQL says is committed is there, whatever is killed."""
    data, sockets, programs = mount / "cluster" / "data", base / "pgk", postgres_programs()[-1]
    sockets.mkdir(mode=0o700)
    data.mkdir(parents=True)
    for directory in (base, mount, data.parent):
        directory.chmod(0o755)
    for directory in (data, sockets):
        shutil.chown(directory, "postgres", "postgres")

    def does(*words):
        return run("setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups", "--", "env",
                   f"PGHOST={sockets}", programs / words[0], *words[1:], cwd="/")

    def starts():
        return does("pg_ctl", "-s", "-w", "-t", "60", "-D", data, "-l", sockets / "log", "-o",
                    f"-k {sockets} -c listen_addresses='' -c synchronous_commit=on", "start").returncode == 0

    made = does("initdb", "-D", data, "--no-instructions").returncode == 0
    made = made and starts() and not does("psql", "-XAtq", "postgres", "-c", "create table t(n integer)").returncode
    os.sync()
    prepared.release()
    count, sure, unsure = 0, set(), set()
    while made and time.monotonic() < end and not failures:
        count += 1
        done = does("psql", "-XAtq", "postgres", "-c", f"insert into t values({count})")
        (unsure if done.returncode else sure).add(count)
        if done.returncode and does("pg_ctl", "-D", data, "status").returncode:
            starts()
    does("pg_ctl", "-s", "-w", "-D", data, "-m", "immediate", "stop")
    said = starts() and does("psql", "-XAt", "postgres", "-c", "select n from t").stdout.split()
    there = set(map(int, said or []))
    if not made or not sure <= there or not there <= sure | unsure:
        log = (sockets / "log").read_text()[-1000:] if (sockets / "log").exists() else ""
        failures.append(f"PostgreSQL: {len(sure - there)} of {len(sure)} commits are missing: {log}")
    does("pg_ctl", "-s", "-w", "-D", data, "-m", "fast", "stop")
    rounds["committed"] = len(sure)
    lost["committed"] = len(unsure)


def synced_lines():
    """An open file: what fsync has said is there, and a removed one keeps its contents."""
    named = open(mount / "named", "w+b", buffering=0)
    removed = open(mount / "removed", "w+b", buffering=0)
    removed.write(b"contents")
    os.unlink(mount / "removed")
    must(ferry, "sync", mount)
    prepared.release()
    count = sure = 0
    try:
        while time.monotonic() < end and not failures:
            try:
                os.pwrite(named.fileno(), b"%07d\n" % count, count * 8)
                count += 1
                if count % 20 == 0:
                    os.fsync(named.fileno())
                    sure = count
            except OSError as error:
                if not is_lost(error):
                    raise
                lost["lines"] = lost.get("lines", 0) + 1
                count = sure
            if count % 100 == 0 and os.pread(named.fileno(), sure * 8, 0) != b"".join(b"%07d\n" % n for n in range(sure)):
                raise RuntimeError("lines that were synced are missing")
            if os.pread(removed.fileno(), 8, 0) != b"contents":
                raise RuntimeError("a removed file has lost its contents")
            time.sleep(0.002)
    except Exception as error:
        failures.append(f"open files: {error}")
    rounds["lines"] = sure


longest = []


def looks():
    """The longest time of one small operation, between each two changes."""
    worst, path = 0.0, mount / "looked at"
    while time.monotonic() < end and not failures:
        begun = time.monotonic()
        try:
            path.write_text("x")
            path.unlink()
        except OSError as error:
            if not may_lose or not is_lost(error):
                failures.append(f"a small operation: {error}")
        worst = max(worst, time.monotonic() - begun)
        if changed.is_set():
            changed.clear()
            longest.append(worst)
            worst = 0.0
        time.sleep(0.001)


changed = threading.Event()
mount.mkdir(parents=True, exist_ok=True)
must(ferry, "mkfs", volume, "--size", "2G")
server = None
if is_served:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    server = subprocess.Popen([ferry, "serve", str(volume), "--insecure", "--listen", address],
                              stdout=open(base / "server", "w"), stderr=subprocess.STDOUT)
    for _ in range(200):
        if not run(ferry, "mount", f"ferry://{address}/", mount, "-o", f"insecure,log={log}").returncode:
            break
        time.sleep(0.05)
else:
    must(ferry, "mount", volume, mount, "-o", f"log={log}")
if not os.path.ismount(mount):
    sys.exit("FAILED: nothing is mounted")
works = [git, sqlite, fio, mapped] + ([make] if shutil.which("cc") and shutil.which("make") else [])
if seconds >= 60:
    works += [work for work in (fsx, pjdfstest) if (tools / work.__name__).exists()]
    works += [postgres] if postgres_programs() else []
    works += [cargo] if shutil.which("cargo") else []
alone = [keeps_open, looks]
checked = [synced, synced_lines, database] + ([committed] if postgres_programs() and seconds >= 60 else [])
if is_checked:
    alone = [*checked, made_once, looks]
if may_lose:
    works = [tree, mapped] + [work for work in works if work in (git, fio, make, cargo) and seconds >= 60]
elif is_killed:
    works += [tree]
threads = [threading.Thread(target=again, args=(work.__name__, work)) for work in works]
threads += [threading.Thread(target=work) for work in alone]
for thread in threads:
    thread.start()
told = []


def daemon():
    """The process that serves the mount."""
    return json.loads(must(ferry, "stats", mount, "--json"))["fuse"]["daemon"]


def kill_daemon():
    """Kills it, and waits for the next one. Returns the milliseconds until it answers."""
    before, begun = daemon(), time.monotonic()
    os.kill(before, 9)
    os.statvfs(mount)
    while daemon() == before:
        time.sleep(0.01)
    return 1000 * (time.monotonic() - begun)


if is_checked and not all(prepared.acquire(timeout=60) for _ in checked):
    failures.append("the programs have not begun")
while is_killed and time.monotonic() < end - 1 and not failures:
    try:
        told.append(round(kill_daemon()))
    except (OSError, RuntimeError) as error:
        failures.append(f"the mount has not survived: {error}")
    changed.set()
    time.sleep(pause)
while not is_killed and time.monotonic() < end - 1 and not failures:
    done = run(ferry, "upgrade-mount", mount)
    if done.returncode:
        failures.append(f"upgrade-mount: {done.stderr.strip()}")
        break
    told.append(int(re.search(r"up to (\d+) ms", done.stdout)[1]))
    changed.set()
    time.sleep(pause)
for thread in threads:
    thread.join(300)
    if thread.is_alive():
        failures.append("a program hangs")
print(json.dumps(rounds), f"lost: {json.dumps(lost)}" if may_lose else "")
if not failures:
    must(ferry, "umount", mount)
    if server:
        server.terminate()
        server.wait(60)
    print(must(ferry, "fsck", volume).strip())
for name, all_of in (("command", told), ("longest operation", [round(1000 * one) for one in longest])):
    ranked = sorted(all_of)
    if ranked:
        at = lambda part: ranked[min(len(ranked) - 1, int(part * len(ranked)))]
        print(f"{name}: {len(ranked)} changes, ms: median {statistics.median(ranked):.0f}, p99 {at(0.99)}, most {ranked[-1]}")
for failure in failures:
    print("FAILED", failure)
# Each program must have worked while a change was made.
idle = [work.__name__ for work in works if not rounds.get(work.__name__)]
sys.exit(bool(failures) or len(told) < 2 or bool(idle and seconds >= 20))
