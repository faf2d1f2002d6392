"""The names of processes that hold claims, and whether they have certainly ended."""

from __future__ import annotations

import os
import socket
from functools import cache


def this_process() -> str:
    """Return the name of this process: host, number, start time, and the machine on which the number is valid."""
    return name_of(os.getpid())


def name_of(pid: int) -> str:
    """Return the name of another process of this machine."""
    stat = _stat(pid)
    return f"{socket.gethostname()}:{pid}:{stat[1] if stat else ''}:{_machine()}"


def host_of(owner: str) -> tuple[str, int]:
    """Return the host and the number in such a name."""
    host, pid, _, _ = owner.rsplit(":", 3)
    return host, int(pid)


def is_on_this_machine(owner: str) -> bool:
    """Return whether a process is, or was, one of this machine since it started."""
    _, _, began, machine = owner.rsplit(":", 3)
    return bool(began and machine) and machine == _machine()


def has_ended(owner: str) -> bool:
    """Return whether a process has ended. `False` where this machine cannot know."""
    if not is_on_this_machine(owner):
        return False
    _, number, began, _ = owner.rsplit(":", 3)
    pid = int(number)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it is there, and another user's
    stat = _stat(pid)
    # One that ended and whose parent has not asked for it yet is a zombie.
    return stat is not None and (stat[0] in "ZX" or stat[1] != began)


def _stat(pid: int) -> tuple[str, str] | None:
    """Return a process's state and when it began, in ticks since the machine started."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


@cache
def _machine() -> str:
    """Return the boot of this machine and the namespace of its process numbers: hosts may share a name, and containers
    count their own processes."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""
