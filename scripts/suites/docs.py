#!/usr/bin/env python3
"""Runs the commands that pages of the documentation show, and compares what they print with what the page says. Each page has a
machine of its own: new namespaces of mounts, processes and the network, the name `vm`, and empty directories /srv, /mnt and /tmp. It
begins in /tmp. All that it starts and mounts ends with it.

A block of commands is ```console, or in README.md an indented block that begins with a prompt:
  $ COMMAND        is run, in the shell that the page's commands share; `laptop$ ` is a prompt, too. It must succeed
  > MORE           belongs to the command above, as a here-document
  OUTPUT           what it prints, on stdout and stderr. `...` stands for anything in a line, a line of `...` for any lines
If a command ends in `&`, the page goes on as soon as it has printed this.
A block behind a line `<!-- not run: REASON -->` is not run.
usage: docs.py FERRY SCRATCH PAGE…
       docs.py FERRY SCRATCH --self-check"""

import os, re, shutil, socket, subprocess, sys, tempfile, threading, time
from pathlib import Path

from apart import collect_the_dead, leave_mounts, loopback_up

PROMPT = re.compile(r"[a-z]*\$ (.*)")
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
# Commands could hide in these: they are to be ```console.
SHELLS = ("", "sh", "bash", "shell")
COMMAND_SECONDS_MAX = 30
PAGE_SECONDS_MAX = 80
# What a page begins with, empty but for what its devices are.
# /var/lib/ferry is what a machine remembers of its volumes.
OWN = ("srv", "mnt", "tmp", "var/lib/ferry", "dev")
DEVICES = ("full", "fuse", "null", "random", "tty", "urandom", "zero")
HOME = Path("/tmp/.docs")


class Command:
    def __init__(self, line, text):
        self.line, self.text, self.expected = line, text, []

    def in_background(self):
        return self.text.rstrip().endswith("&")

    def matches(self, output):
        """Of what runs in the background, the beginning."""
        lines = ["(?:.*\n)*" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n" for line in self.expected]
        match = re.match if self.in_background() else re.fullmatch
        return bool(match("".join(lines), output))


def fenced(lines, page):
    """Blocks between fences, each with the number of its first line, and the language."""
    at, marked = 0, False
    while at < len(lines):
        line = lines[at].strip()
        if line.startswith("```"):
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
            if line[3:] in SHELLS and not marked:
                raise SystemExit(f"{page}:{at + 1}: a block of commands begins with ```console")
            yield at + 2, lines[at + 1 : end], line[3:], marked
            at = end
        if line:
            marked = bool(NOT_RUN.fullmatch(line))
        at += 1


def indented(lines):
    block, marked = [], False
    for number, line in enumerate(lines + ["."], 1):
        if line.startswith("    "):
            block.append(line[4:])
        elif not line and block:
            block.append("")
        elif line:
            if block and PROMPT.fullmatch(block[0]):
                yield number - len(block), block, "console", marked
            block, marked = [], bool(NOT_RUN.fullmatch(line))


def commands_of(page):
    """The commands of a page, and how many blocks are not run."""
    lines, commands, skipped = Path(page).read_text().splitlines(), [], 0
    for first, block, language, marked in indented(lines) if Path(page).name == "README.md" else fenced(lines, page):
        if language != "console" or marked:
            skipped += marked
            continue
        while block and not block[-1].strip():
            block.pop()
        for number, line in enumerate(block, first):
            prompt = PROMPT.fullmatch(line)
            if prompt:
                commands.append(Command(number, prompt[1]))
            elif number == first:
                raise SystemExit(f"{page}:{number}: a block of commands begins with a prompt, `$ `")
            elif line.startswith("> ") and not commands[-1].expected:
                commands[-1].text += "\n" + line[2:]
            else:
                commands[-1].expected.append(line.rstrip())
    return commands, skipped


def drain(log):
    while True:
        log.recv(65536)


def furnish(ferry, scratch):
    """The directories of this page alone, and a system log that forgets."""
    leave_mounts()
    for name in OWN:
        (scratch / name).mkdir(parents=True)
        (scratch / name).chmod(0o1777 if name == "tmp" else 0o755)
    for name in DEVICES:
        if not os.path.exists(f"/dev/{name}"):
            continue
        (scratch / "dev" / name).touch()
        subprocess.run(["mount", "--bind", f"/dev/{name}", scratch / "dev" / name], check=True)
    (scratch / "dev/fd").symlink_to("/proc/self/fd")
    (scratch / "dev/shm").mkdir()
    (scratch / "dev/shm").chmod(0o1777)
    # The path of a socket is short.
    log, here = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), os.getcwd()
    os.chdir(scratch / "dev")
    log.bind("log")
    os.chdir(here)
    threading.Thread(target=drain, args=[log], daemon=True).start()
    program = scratch / "tmp/.docs/bin/ferry"
    program.parent.mkdir(parents=True)
    try:
        os.link(ferry, program)
    except OSError:
        shutil.copy(ferry, program)
    # One of them may have the scratch directory in it, and hide it.
    inside = [os.open(scratch / name, os.O_PATH) for name in OWN]
    for name, directory in zip(OWN, inside):
        Path("/", name).mkdir(exist_ok=True)
        subprocess.run(["mount", "--no-canonicalize", "--rbind", f"/proc/self/fd/{directory}", f"/{name}"], check=True, pass_fds=[directory])
        os.close(directory)


class Shell:
    def __init__(self):
        status, self.child_status = os.pipe()
        self.status = os.fdopen(status, "rb", buffering=0)
        environment = {
            "PATH": f"{HOME}/bin:{os.environ['PATH']}",
            "HOME": str(HOME), "LC_ALL": "C.UTF-8", "TZ": "UTC", "STATUS": str(self.child_status),
            "FERRY_SCRIPT": os.environ.get("FERRY_SCRIPT", ""),
            "RUSTUP_HOME": os.environ.get("RUSTUP_HOME", os.path.expanduser("~/.rustup")),
        }  # fmt: skip
        self.shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"], stdin=subprocess.PIPE, cwd="/tmp", env=environment, pass_fds=[self.child_status]
        )
        self.number = 0

    def run(self, command):
        """What it printed, and its status: None if it is not done."""
        self.number += 1
        script, output = HOME / f"command.{self.number}", HOME / f"output.{self.number}"
        script.write_text(command.text + "\n")
        self.shell.stdin.write(f'eval "$(cat {script})" >{output} 2>&1 </dev/null; echo $? >&$STATUS\n'.encode())
        self.shell.stdin.flush()
        end = time.monotonic() + COMMAND_SECONDS_MAX
        os.set_blocking(self.status.fileno(), False)
        status = None
        while time.monotonic() < end:
            said = self.status.read()
            status = int(said) if said else status
            text = output.read_text(errors="replace") if output.exists() else ""
            text = text if not text or text.endswith("\n") else text + "\n"
            if status is not None and (not command.in_background() or command.matches(text)):
                return text, status
            time.sleep(0.01)
        return text, None


def quoted(lines):
    return "".join(f"    {line}\n" for line in lines) or "    (nothing)\n"


def run_inside(ferry, scratch, page):
    """In the page's own namespaces: the first difference ends it."""
    commands, skipped = commands_of(page)
    furnish(ferry, scratch)
    loopback_up()
    socket.sethostname("vm")
    shell = Shell()
    for command in commands:
        text, status = shell.run(command)
        if status == 0 and command.matches(text):
            continue
        what = {None: f"not done after {COMMAND_SECONDS_MAX} s", 0: "prints something else"}.get(status, f"exit code {status}")
        print(f"{page}:{command.line}: `{command.text}`: {what}")
        print(f"  expected:\n{quoted(command.expected)}  got:\n{quoted(text.splitlines())}", end="")
        return 1
    print(f"{page}: {len(commands)} commands, {skipped} blocks are not run")
    return 0


def run(ferry, scratch, page):
    """The exit code for a page, and what there is to say of it."""
    with tempfile.TemporaryDirectory(dir=scratch, prefix="page.") as own:
        unshare = ["unshare", "--mount", "--propagation", "private", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "--net"]
        inside = [sys.executable, os.path.abspath(__file__), ferry, own, "--inside", page]
        begun = subprocess.Popen(unshare + inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            said = begun.communicate(timeout=PAGE_SECONDS_MAX)[0]
        except subprocess.TimeoutExpired:
            begun.kill()
            return 1, f"{page}: not done after {PAGE_SECONDS_MAX} s\n{begun.communicate()[0]}"
    return begun.returncode, said


# A page, and what is said of it: that it is right, or what is wrong with it.
RIGHT = """\
```console
$ mkdir mnt; ferry mkfs data.ferry --size 1G
data.ferry: a new volume of 1.0 GiB, ..., id ...
$ ferry mount data.ferry mnt && echo one >mnt/a && printf '%s' two three
twothree
$ cat >mnt/b <<END
> here
> END
$ cat mnt/b; ls mnt/a mnt/none || true
here
...
$ (sleep 0.3; echo begun; sleep 600) &
begun
```

<!-- not run: this program is nowhere -->
```console
$ no-such-program
```
"""
CASES = (
    (RIGHT, 0, "5 commands, 1 blocks are not run"),
    (RIGHT.replace("1.0 GiB", "2.0 GiB"), 1, "page.md:2: `mkdir mnt; ferry mkfs data.ferry --size 1G`: prints something else"),
    (RIGHT.replace("\ntwothree", ""), 1, "expected:\n    (nothing)\n  got:\n    twothree"),
    (RIGHT.replace("\nhere\n...", "\nhere"), 1, "page.md:9"),
    (RIGHT.replace(" || true", ""), 1, "exit code 2"),
    (RIGHT.replace("<!-- not run: this program is nowhere -->", ""), 1, "exit code 127"),
    (RIGHT.replace("this program is nowhere", ""), 1, "exit code 127"),
    (RIGHT.replace("```console", "```sh", 1), 1, "page.md:1: a block of commands begins with ```console"),
    (RIGHT.replace("$ mkdir", "mkdir"), 1, "page.md:2: a block of commands begins with a prompt"),
)


def self_check(ferry, scratch):
    wrong = 0
    for number, (text, code, part) in enumerate(CASES):
        page = Path(scratch) / "page.md"
        page.write_text(text)
        got, said = run(ferry, scratch, str(page))
        if got != code or part not in said:
            wrong += 1
            print(f"case {number}: exit code {got}, not {code}, or not {part!r} in:\n{said}")
    print(f"{len(CASES) - wrong} of {len(CASES)} pages are judged as they should be")
    return 1 if wrong else 0


def main():
    ferry, scratch, pages = os.path.abspath(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if pages[0] == "--self-check":
        return self_check(ferry, scratch)
    if pages[0] == "--inside":
        collect_the_dead()
        return run_inside(ferry, Path(scratch), pages[1])
    results = [run(ferry, scratch, page) for page in pages]
    print("".join(said for _, said in results), end="")
    return 1 if any(code for code, _ in results) else 0


sys.exit(main())
