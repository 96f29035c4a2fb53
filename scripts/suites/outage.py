#!/usr/bin/env python3
"""Programs that write while a store is away: threads that make files of known contents, and sync
every fourth with its name before they note it as acknowledged. Any error ends it.
usage: outage.py write DIRECTORY ACKNOWLEDGED END-FILE | outage.py check DIRECTORY ACKNOWLEDGED"""
import os, random, sys, threading, time

THREADS = 4
LENGTH_MAX = 64 << 10
# So many files a second and thread, at most: what is written stays small.
PAUSE = 0.005
END = 600 + 600


def contents(name):
    chance = random.Random(name)
    return chance.randbytes(chance.randrange(LENGTH_MAX))


def write(directory, acknowledged, end_file):
    os.mkdir(directory)
    names = os.open(directory, os.O_RDONLY)
    notes = open(acknowledged, "w", buffering=1)
    errors = []
    begun = time.monotonic()

    def run(thread):
        number = 0
        try:
            while not errors and not os.path.exists(end_file) and time.monotonic() < begun + END:
                name = f"{thread}-{number}"
                data = contents(name)
                file = os.open(f"{directory}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                assert os.write(file, data) == len(data)
                if number % 4 == 0:
                    os.fsync(file)
                    os.fsync(names)
                    notes.write(f"{name}\n")
                os.close(file)
                number += 1
                time.sleep(PAUSE)
        except (OSError, AssertionError) as error:
            errors.append(f"{thread}-{number}: {error!r}")

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        sys.exit("\n".join(errors))


def check(directory, acknowledged):
    names = open(acknowledged).read().split()
    assert len(names) >= 200, f"only {len(names)} files were acknowledged"
    for name in names:
        with open(f"{directory}/{name}", "rb") as file:
            assert file.read() == contents(name), f"{name} has other contents"
    print(f"{len(names)} files are as they were acknowledged")


{"write": write, "check": check}[sys.argv[1]](*sys.argv[2:])
