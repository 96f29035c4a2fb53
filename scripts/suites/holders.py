"""The process behind a mount that starts its daemons."""

import re
from pathlib import Path


def holder_of(daemon):
    """The process that starts another daemon if this one is killed. If it is killed, the mount ends."""
    status = Path(f"/proc/{daemon}/status").read_text(encoding="utf-8", errors="replace")
    return int(re.search(r"^PPid:\s*(\d+)", status, re.MULTILINE)[1])
