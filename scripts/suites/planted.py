#!/usr/bin/env python3
"""Damages copies of a real volume file as a user's disk would, area by area, and holds what every command says of it against what
was done: exit codes, messages, JSON, and each file's contents before and after a repair.
usage: planted.py FERRY SCRATCH"""

import hashlib, json, os, random, shutil, subprocess, sys, time

FERRY, SCRATCH = sys.argv[1], sys.argv[2]
VOLUME, IMAGE, MNT = (os.path.join(SCRATCH, name) for name in ("planted.ferry", "planted.image", "planted.mnt"))
BLOCK = 4096
random.seed(3)
failures = []


def ferry(*words, ok=None):
    """Runs a command; its exit code, and what it said. No answer may be a panic, a signal, or late."""
    done = subprocess.run([FERRY, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, errors="replace")
    said = done.stdout + done.stderr
    if "panicked" in said or "RUST_BACKTRACE" in said or done.returncode < 0 or done.returncode > 8:
        fail(f"ferry {' '.join(words)}: exit {done.returncode}\n{said}")
    if ok is not None and done.returncode not in ok:
        fail(f"ferry {' '.join(words)}: exit {done.returncode}, not {ok}\n{said}")
    if done.returncode not in (0, 1, 4) and not said.strip():
        fail(f"ferry {' '.join(words)}: exit {done.returncode} without a word")
    return done.returncode, done.stdout, done.stderr


case = "start"


def fail(what):
    failures.append(case)
    print(f"--- {case}: {what}", flush=True)


mount_said = ""


def mount(image, mode=None):
    global mount_said
    # On a busy machine the daemon of the last mount may still be on its way out.
    for _ in range(60):
        code, _, mount_said = ferry("mount", image, MNT, *(["-o", mode] if mode else []))
        if "in use by process" not in mount_said:
            break
        time.sleep(0.5)
    return code == 0


def umount():
    ferry("umount", MNT, ok=[0])


def contents():
    """What each file holds; `None` where reading fails as it should."""
    found = {}

    def refused(error):
        if error.errno != 5:
            fail(f"{error}")

    for top, dirs, names in os.walk(MNT, onerror=refused):
        for name in names:
            path = os.path.join(top, name)
            try:
                if os.path.islink(path):
                    found[os.path.relpath(path, MNT)] = os.readlink(path)
                    continue
                with open(path, "rb") as file:
                    found[os.path.relpath(path, MNT)] = hashlib.sha1(file.read()).hexdigest()
            except OSError as error:
                refused(error)
                found[os.path.relpath(path, MNT)] = None
    return found


def report(*words, ok):
    code, out, err = ferry("fsck", IMAGE, "--json", *words, ok=ok)
    try:
        return code, json.loads(out)
    except ValueError:
        fail(f"no JSON: {out!r} {err!r}")
        return code, {}


def explained(said):
    """Each finding says what, what it means and what to do; each repair what was done."""
    for one in said.get("findings", []):
        if not (one["what"] and one["means"] and one["advice"] and one["code"]):
            fail(f"a finding that says too little: {one}")
    for one in said.get("repairs", []):
        if not (one["what"] and one["code"]):
            fail(f"a repair that says too little: {one}")


EMPTY = hashlib.sha1(b"").hexdigest()


def whole(known, found, lost):
    """Nothing was made up, and nothing is missing but what may be."""
    for path, sum in known.items():
        if found.get(path) != sum and path not in lost and lost != "any":
            fail(f"{path} is {found.get(path, 'missing')}")
        # A commit by time may have had the file before its contents.
        if found.get(path) not in (None, sum) and not (lost == "any" and found[path] == EMPTY):
            fail(f"{path} holds what was never in it")


def everybody(name, known, damage, check, repaired, lost=(), data=False, mounts=None):
    """`check`, `repaired`: exit codes of fsck without and with --repair. `lost`: files that may be gone. `mounts`: it must, or must not."""
    global case
    case = name
    shutil.copyfile(VOLUME_OF[name.split(":")[0]], IMAGE)
    damage(IMAGE)
    words = [] if data else ["--metadata-only"]
    before = open(IMAGE, "rb").read()
    code, said = report(*words, ok=check)
    explained(said)
    if code == 4 and not said.get("findings") or code == 0 and said.get("findings"):
        fail(f"exit {code} with {len(said.get('findings', []))} findings")
    for part in (["superblock"], ["log"], ["keys"], ["segments"], ["inode", "1"], ["path", "dir/file 3"]):
        # 1: what is left of it has no such path.
        ferry("debug", IMAGE, *part, ok=[0, 1, 4, 8])
        for line in ferry("debug", IMAGE, *part, "--json", ok=[0, 1, 4, 8])[1].splitlines():
            json.loads(line)
    ferry("scrub", IMAGE, ok=[0, 4, 8])
    ferry("tune", IMAGE, "--flush", "each", ok=[1])
    if open(IMAGE, "rb").read() != before:
        fail("a command that only reads wrote to the volume")
    # As a mount finds it, on a copy.
    shutil.copyfile(IMAGE, IMAGE + ".2")
    for mode in ("ro", None):
        up = mount(IMAGE + ".2", mode)
        if mounts is not None and up != mounts and mode is None:
            fail(f"mounted: {up}: {mount_said}")
        if up:
            found = contents()
            whole(known, found, lost if mounts else "any")
            umount()
    code, said = report("--repair", *words, ok=repaired)
    explained(said)
    if code == 1 and not said.get("repairs"):
        fail("repaired, and does not say what")
    left = [one["what"] for one in said.get("findings", [])]
    again, said = report(*words, ok=[0] if code < 4 else [code])
    twice, said = report("--repair", *words, ok=[0] if code < 4 else [code])
    if said.get("repaired"):
        fail(f"a second repair: {said['repairs']}")
    if [one["what"] for one in said.get("findings", [])] != left:
        fail(f"first {left}, then {said.get('findings')}")
    if code < 4:
        if not mount(IMAGE):
            return fail(f"repaired, and cannot be mounted: {mount_said}")
        whole(known, contents(), lost)
        with open(os.path.join(MNT, "new"), "wb") as file:
            file.write(b"new" * 10000)
            os.fsync(file.fileno())
        umount()
        report(*words, ok=[0])


def at(place, bytes):
    def damage(image):
        with open(image, "r+b") as file:
            file.seek(place)
            file.write(bytes)

    return damage


def several(*damages):
    return lambda image: [damage(image) for damage in damages]


def debug(*words, image):
    return [json.loads(line) for line in ferry("debug", image, *words, "--json", ok=[0])[1].splitlines()]


def make(clean):
    """A volume with files of several kinds; one that was not unmounted is copied while nothing happens to it."""
    if os.path.exists(VOLUME):
        os.unlink(VOLUME)
    ferry("mkfs", VOLUME, "--size", "64M", ok=[0])
    mount(VOLUME)
    os.mkdir(f"{MNT}/dir")
    for n in range(40):
        with open(f"{MNT}/dir/file {n}", "wb") as file:
            file.write(random.randbytes(n * 1500))
    for n in range(400):
        with open(f"{MNT}/name that is long enough to fill some pages {n}", "wb") as file:
            file.write(b"%d" % n)
    os.symlink("dir/file 3", f"{MNT}/link")
    ferry("sync", MNT, ok=[0])
    known = contents()
    if not clean:
        time.sleep(2)
        shutil.copyfile(VOLUME, VOLUME + ".live")
    umount()
    if not clean:
        os.replace(VOLUME + ".live", VOLUME)
    shutil.copyfile(VOLUME, VOLUME_OF["clean" if clean else "live"])
    return known


VOLUME_OF = {kind: os.path.join(SCRATCH, f"planted.{kind}") for kind in ("clean", "live")}
os.makedirs(MNT, exist_ok=True)
known = {"live": make(False), "clean": make(True)}
image = VOLUME_OF["clean"]
sb = debug("superblock", image=image)[0]["copy_1"]
noise = random.randbytes(BLOCK)
zeros = bytes(BLOCK)
HALF = sb["size_bytes"] // 2

# The superblock.
for n, place in enumerate((0, 1 << 20)):
    for kind, bytes_ in (("zeros", zeros), ("noise", noise), ("a byte", b"\xff")):
        place_ = place + (200 if kind == "a byte" else 0)
        everybody(f"clean: superblock {n + 1}, {kind}", known["clean"], at(place_, bytes_), [4], [1], mounts=True)
# A mount refuses to begin with the copy in the last block; a repair does.
everybody("clean: both superblocks", known["clean"], several(at(0, noise), at(1 << 20, zeros)), [4], [1], mounts=False)
last = several(at(0, noise), at(1 << 20, zeros), at(sb["size_bytes"] - BLOCK, zeros))
everybody("clean: all three superblocks", known["clean"], last, [8], [8], mounts=False)

# The log: of a volume that was unmounted nobody needs it.
records = [one for one in debug("log", image=VOLUME_OF["live"]) if one["type"] == "record"]
needed = [one for one in records if one["recovery"] != "in the home store"]
everybody("clean: the whole log", known["clean"], at(sb["log_offset"], bytes(sb["log_len_bytes"])), [0], [0], mounts=True)
if len(needed) < 3:
    fail(f"too short a log: {records}")
for n, one in enumerate((needed[0], needed[len(needed) // 2])):
    everybody(f"live: log record {n}", known["live"], at(one["offset"], noise), [4], [1], lost="any", mounts=False)

# The home store's map: either slot may be lost, both not.
for slot in range(2):
    place = sb["home_map_offsets"][slot]
    everybody(f"clean: home map {slot}", known["clean"], at(place, zeros), [4], [1], mounts=True)
both = several(*(at(place, bytes(sb["home_map_len_bytes"])) for place in sb["home_map_offsets"]))
everybody("clean: both home maps", known["clean"], both, [4], [4], mounts=False)

# The home store: each block that holds something, one copy or both.
half = sb["segment_len_bytes"] // BLOCK // 2
pages = half - -(-half // 1025)
raw = open(image, "rb").read()
homes = [one["offset"] for one in debug("segments", image=image) if one["use"] == "home"]
used = [
    place
    for home in homes
    for place in range(home, home + pages * BLOCK, BLOCK)
    if any(raw[place : place + BLOCK])
]
for place in random.sample(used, 8):
    everybody(f"clean: one copy of the home store's block at {place}", known["clean"], at(place, zeros), [0, 4], [0, 1], mounts=True)
    second = place + half * BLOCK
    everybody(f"clean: the other copy of the home store's block at {place}", known["clean"], at(second, noise), [0, 4], [0, 1], mounts=True)
    both = several(at(place, zeros), at(second, zeros))
    everybody(f"clean: both copies of the home store's block at {place}", known["clean"], both, [0, 4], [0, 1, 4], lost="any")
for copy in range(2):
    place = homes[0] + (pages + copy * half) * BLOCK
    everybody(f"clean: checksums {copy} of the home store", known["clean"], at(place, noise), [0, 4], [0, 1], mounts=True)

# Data: found unless --metadata-only says not to look, and by a reader of the file.
extents = [one for one in debug("path", "dir/file 30", image=image) if one["type"] == "extent"]
place = extents[0]["device_offset"] + BLOCK
everybody("clean: a block of data", known["clean"], at(place, noise), [4], [1], lost=["dir/file 30"], data=True)
everybody("clean: a block of data, not looked at", known["clean"], at(place, noise), [0], [0], lost=["dir/file 30"])
data = [one for one in debug("segments", image=image) if one["use"] == "data"]
summary = [at_ for one in data for at_ in range(one["offset"], one["offset"] + sb["segment_len_bytes"], BLOCK) if raw[at_ : at_ + 8] == b"FERRYSUM"]
everybody("clean: a summary", known["clean"], at(summary[0], zeros), [0], [0], mounts=True)

# One block of zeros anywhere in front of the segments.
front = [place for place in range(0, sb["segments_offset"], BLOCK) if any(raw[place : place + BLOCK])]
for place in random.sample(front, min(8, len(front))):
    everybody(f"clean: zeros at {place}", known["clean"], at(place, zeros), [0, 4], [0, 1], mounts=True)


# Files that are no volume, or a part of one.
def hole(image):
    subprocess.run(["fallocate", "--punch-hole", "--offset", str(HALF // BLOCK * BLOCK), "--length", "8M", image], check=True)


everybody("clean: a hole in the middle", known["clean"], hole, [0, 4], [0, 1, 4], lost="any", data=True)
for size in (sb["size_bytes"] - BLOCK, HALF, 1 << 20, BLOCK, 100, 0):
    cut = lambda image, size=size: os.truncate(image, size)
    # The file gets its length again where both superblocks and the log are there.
    repaired = [1] if size >= HALF else [4, 8]
    everybody(f"clean: cut off at {size}", known["clean"], cut, [4, 8], repaired, lost="any", mounts=False)
text = lambda image: open(image, "w").write("This is not a volume.\n" * 1000)
everybody("clean: a text file", known["clean"], text, [8], [8], mounts=False)
case = "no volume"
for path in (SCRATCH, os.path.join(SCRATCH, "nobody"), "/dev/null", "/etc/passwd/x"):
    for words in (["fsck", path], ["fsck", path, "--repair"], ["scrub", path], ["debug", path, "keys"], ["mount", path, MNT], ["tune", path, "--flush", "each"]):
        code, out, err = ferry(*words)
        if code == 0 or not err.strip() or path not in err:
            fail(f"{words}: exit {code}, {err!r}")
print(f"{len(failures)} failures")
sys.exit(bool(failures))
