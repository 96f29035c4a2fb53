#!/usr/bin/env python3
"""Scrapes mounts and servers with Prometheus while they work: promtool finds no fault, each query of each panel of the dashboard for
Grafana has data, each rule is evaluated, no alert fires while all is well, and alerts fire when something is not. It runs in namespaces
of its own, of mounts, processes and the network.
usage: metrics.py FERRY SCRATCH"""

import fcntl, json, os, re, subprocess, sys, time, urllib.parse, urllib.request
from pathlib import Path

from apart import collect_the_dead, leave_mounts, loopback_up

FERRY, SCRATCH = sys.argv[1], Path(sys.argv[2]) / "metrics"
CONTRIB = Path(__file__).resolve().parents[2] / "contrib"
PORT = 9090
WORK_SECONDS, WAIT_SECONDS_MAX = 15, 40
# Queries that have no data while all is well: counters that begin with a fault, and mounts that are not here.
ONLY_WITH = {
    "ferryfs_replica_": "a replica, which this suite does not mount",
    "ferryfs_store_held_seconds": "a store that does not answer",
    "ferryfs_local_log_": "a local log, which this suite does not use",
}


def ferry(*args):
    return subprocess.run([FERRY, *map(str, args)], check=True, capture_output=True, text=True, timeout=60).stdout


def done(what):
    print(f"      {what}", flush=True)


def get(path, **query):
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        return json.load(answer)["data"]


def wait_for(what, is_so):
    """Looks twice a second, until it is so."""
    end = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        try:
            found = is_so()
        except OSError:
            found = None
        if found:
            return found
        assert time.monotonic() < end, what
        time.sleep(0.5)


def work(directory, seconds):
    """Makes, syncs, reads, locks and removes files; fails some requests, too."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        number += 1
        path = f"{directory}/file-{number % 40}"
        with open(path, "wb") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            file.write(bytes(20_000))
            os.fsync(file.fileno())
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.read()
        try:
            os.rmdir(directory)
        except OSError:
            pass
        if number % 2:
            os.unlink(path)
        time.sleep(0.02)


def begin(volume, mount, port, *options):
    mount.mkdir()
    ferry("mount", volume, mount, "-o", ",".join([f"metrics=127.0.0.1:{port}", *options]))
    return mount


def serve(volume, port):
    """A server with TLS, and what its client needs."""
    names = SCRATCH / "tls"
    ferry("cert", "init", names, "--host", "127.0.0.1")
    ferry("cert", "issue", names, "laptop")
    server = subprocess.Popen(
        [FERRY, "serve", volume, "--tls", names, "--listen", "127.0.0.1:7001", "--metrics", f"127.0.0.1:{port}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    for line in server.stdout:
        if "address=127.0.0.1:7001" in line:
            return server, names / "laptop"
    raise AssertionError("the server has ended")


def configuration(ports):
    """Prometheus as docs/metrics.md has it, quicker: alerts that wait for minutes wait for a second."""
    rules = (CONTRIB / "prometheus/ferryfs.rules.yml").read_text()
    (SCRATCH / "rules.yml").write_text(re.sub(r"\bfor: \d+[smh]", "for: 1s", rules))
    targets = ", ".join(f"'127.0.0.1:{port}'" for port in ports)
    (SCRATCH / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: ['{SCRATCH}/rules.yml']\n"
        f"scrape_configs: [{{job_name: ferryfs, static_configs: [{{targets: [{targets}]}}]}}]\n"
    )


def lint(ports):
    subprocess.run(["promtool", "check", "rules", CONTRIB / "prometheus/ferryfs.rules.yml"], check=True, capture_output=True, timeout=30)
    for port in ports:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
        said = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=30)
        assert said.returncode == 0 and not said.stderr, said.stderr.decode()
    done("promtool finds no fault in the rules and the metrics")


def panels():
    dashboard = json.loads((CONTRIB / "grafana/ferryfs.json").read_text())
    taken, numbers = {}, set()
    for panel in dashboard["panels"]:
        box, title = panel["gridPos"], panel["title"]
        assert panel["id"] not in numbers, f"{title}: its number is taken"
        numbers.add(panel["id"])
        for cell in [(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])]:
            assert cell[0] < 24 and cell not in taken, f"{title} is on top of {taken.get(cell)}"
            taken[cell] = title
        for target in panel.get("targets", []):
            yield title, target["expr"].replace("$instance", ".*").replace("$__rate_interval", "5s")


def each_panel_has_data():
    def lacking():
        empty = [(title, query) for title, query in panels() if not get("/api/v1/query", query=query)["result"]]
        return [(title, query) for title, query in empty if not any(name in query for name in ONLY_WITH)]

    last = []

    def is_complete():
        last[:] = lacking()
        return not last

    try:
        wait_for("data", is_complete)
    except AssertionError:
        raise AssertionError("no data:\n" + "\n".join(f"{title}: {query}" for title, query in last)) from None
    unneeded = [name for name in ONLY_WITH if not any(name in query for _, query in panels())]
    assert not unneeded, f"no panel has {unneeded}"
    done(f"{len(list(panels()))} queries of the panels have data, but those of {len(ONLY_WITH)} kinds that need a fault or another mount")


def rules():
    return [rule for group in get("/api/v1/rules")["groups"] for rule in group["rules"]]


def firing():
    return {rule["name"] for rule in rules() if rule["state"] == "firing"}


def main():
    collect_the_dead()
    leave_mounts()
    loopback_up()
    SCRATCH.mkdir(parents=True)
    ports = {name: 9101 + at for at, name in enumerate(("local", "mirror", "stored", "server", "client", "small"))}
    volume = {name: str(SCRATCH / f"{name}.ferry") for name in ("local", "mirror", "served", "small")}
    ferry("mkfs", volume["local"], "--size", "128M")
    ferry("mkfs", volume["small"], "--size", "64M")
    ferry("mkfs", volume["served"], "--size", "64M")
    ferry("mkfs", volume["mirror"], "--size", "64M", "--device", "mirror", SCRATCH / "side-a", SCRATCH / "side-b")
    store = f"dir://{SCRATCH}/store"
    (SCRATCH / "store").mkdir()
    (SCRATCH / "cache").mkdir()
    ferry("mkfs", store, "--size", "1G")
    mounts = [
        begin(volume["local"], SCRATCH / "at-local", ports["local"]),
        begin(volume["mirror"], SCRATCH / "at-mirror", ports["mirror"]),
        begin(volume["small"], SCRATCH / "at-small", ports["small"]),
        begin(store, SCRATCH / "at-store", ports["stored"], f"cache={SCRATCH}/cache", "cache_disk=64M"),
    ]
    server, names = serve(volume["served"], ports["server"])
    mounts.append(begin("ferry://127.0.0.1:7001/", SCRATCH / "at-client", ports["client"], f"tls={names}"))
    processes = [server]
    try:
        lint(ports.values())
        configuration(ports.values())
        prometheus = [
            "prometheus", f"--config.file={SCRATCH}/prometheus.yml", f"--storage.tsdb.path={SCRATCH}/tsdb", f"--web.listen-address=127.0.0.1:{PORT}"
        ]
        with (SCRATCH / "prometheus.log").open("wb") as log:
            processes.append(subprocess.Popen(prometheus, stdout=log, stderr=log))
        begun = time.monotonic()
        workers = [os.fork() or worker(mount) for mount in mounts]
        wait_for("targets", lambda: len(get("/api/v1/query", query="up == 1")["result"]) == len(ports))
        each_panel_has_data()
        for worker_process in workers:
            assert os.waitpid(worker_process, 0)[1] == 0, "a worker has failed"
        time.sleep(max(0, begun + WORK_SECONDS - time.monotonic()))
        bad = [(rule["name"], rule.get("lastError")) for rule in rules() if rule["health"] != "ok"]
        assert rules() and not bad, bad
        assert not firing(), firing()
        done(f"{len(rules())} rules are evaluated, and no alert fires")
        subprocess.run(["dd", "if=/dev/zero", f"of={SCRATCH}/at-small/full", "bs=1M"], capture_output=True, timeout=60)
        server.kill()
        wanted = {"FerryfsVolumeNearlyFull", "FerryfsDoesNotAnswer"}
        wait_for(f"{wanted}", lambda: wanted <= firing())
        done(f"{' and '.join(sorted(wanted))} fire")
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for mount in mounts:
            subprocess.run([FERRY, "umount", "--force", mount], capture_output=True, timeout=60)


def worker(mount):
    """What a child of this process does; it returns nothing."""
    try:
        work(mount, WORK_SECONDS)
        os._exit(0)
    except BaseException as error:
        print(f"{mount}: {error}", flush=True)
        os._exit(1)


main()
