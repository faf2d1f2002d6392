"""Whether the process that holds a claim is gone: only what is certain counts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from servers import wait_until
from weft.systems import process


def test_this_process_lives() -> None:
    owner = process.this_process()
    assert process.host_of(owner) == (os.uname().nodename, os.getpid())
    assert not process.has_ended(owner)


def test_a_process_that_ended_is_gone_before_and_after_it_is_reaped() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "from weft.systems.process import this_process; print(this_process())"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    owner = child.stdout.readline().strip()
    assert process.host_of(owner)[1] == child.pid
    wait_until(lambda: process.has_ended(owner), "the child to be a zombie")
    child.communicate()
    assert child.returncode == 0 and process.has_ended(owner)


def test_a_number_that_another_process_has_now() -> None:
    host, number, began, machine = process.this_process().rsplit(":", 3)
    assert process.has_ended(":".join((host, number, str(int(began) - 1), machine)))


@pytest.mark.parametrize("machine", ["another-boot/4026531836", ""])
def test_of_another_machine_nothing_is_known(machine: str) -> None:
    assert not process.has_ended(f"{os.uname().nodename}:999999999:1:{machine}")


def test_a_number_that_nobody_has() -> None:
    own_machine = process.this_process().rsplit(":", 1)[1]
    assert process.has_ended(f"x:{2**22 + 5}:1:{own_machine}")
