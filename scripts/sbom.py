#!/usr/bin/env python3
"""Lists what is in the program, for a release: a CycloneDX 1.5 document on standard output.

usage: scripts/sbom.py
"""

import json
import os
import subprocess
import tomllib
from datetime import datetime, timezone

REPO = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = "x86_64-unknown-linux-gnu"


def run(*args):
    return subprocess.run(args, cwd=REPO, check=True, stdout=subprocess.PIPE, text=True).stdout


def crates():
    """Each crate that the program is linked with: its name, version and licence."""
    tree = run(
        *("cargo", "tree", "--locked", "--package", "ferry", "--edges", "normal"),
        *("--target", TARGET, "--prefix", "none", "--format", "{p}\t{l}"),
    )
    found = set()
    for line in tree.splitlines():
        if not line:
            continue
        # Behind the version stands where a crate of the workspace is, or that it is a macro.
        crate, licence = line.split("\t")
        name, version = crate.split()[:2]
        found.add((name, version.removeprefix("v"), licence.removesuffix(" (*)").strip()))
    return sorted(found)


def checksums():
    """The SHA-256 of each crate of a registry, by name and version."""
    with open(os.path.join(REPO, "Cargo.lock"), "rb") as file:
        packages = tomllib.load(file)["package"]
    return {(one["name"], one["version"]): one["checksum"] for one in packages if "checksum" in one}


def component(name, version, licence, checksum):
    one = {
        "type": "library",
        "bom-ref": f"{name}@{version}",
        "name": name,
        "version": version,
        "licenses": [{"expression": licence.replace("/", " OR ")}],
    }
    if checksum:
        one["purl"] = f"pkg:cargo/{name}@{version}"
        one["hashes"] = [{"alg": "SHA-256", "content": checksum}]
    return one


def main():
    sums = checksums()
    all_crates = crates()
    (program,) = [one for one in all_crates if one[0] == "ferry"]
    made = int(run("git", "log", "-1", "--format=%ct"))
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(made, timezone.utc).isoformat(),
            "component": component(*program, None) | {"type": "application"},
        },
        "components": [
            component(*one, sums.get(one[:2])) for one in all_crates if one != program
        ],
    }
    print(json.dumps(document, indent=1))


main()
