"""Spark's JVM ends with the process that started it, is no business of a forked child, and keeps off the terminal."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from servers import wait_until
from tests.engine.conftest import Python, finish


def wait_until_gone(pid: int, seconds: float = 15) -> float:
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return time.monotonic() - start
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"the JVM outlived its process by {seconds} seconds")


START = """
from weft.engine import session
weft.spark().range(10).count()
print(session._running.jvm.process.pid, flush=True)
"""


@pytest.mark.full
@pytest.mark.timing
def test_ends_with_a_killed_process_that_has_a_forked_child(python: Python) -> None:
    """The child has a copy of the pipe that the JVM waits on."""
    process = python(
        START
        + """
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""
    )
    assert process.stdout is not None
    pid, child = int(process.stdout.readline()), int(process.stdout.readline())
    process.kill()
    try:
        wait_until_gone(pid)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.timing
def test_ends_with_a_process_killed_during_the_start(python: Python) -> None:
    process = python("""
        from weft.engine import jvm
        original = jvm._gateway
        def tell(process, answer, log):
            print(process.pid, flush=True)
            return original(process, answer, log)
        jvm._gateway = tell
        weft.spark()
        time.sleep(600)
    """)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    wait_until_gone(pid, 60)


@pytest.mark.full
def test_a_forked_child_has_a_session_of_its_own(python: Python) -> None:
    """One that its user stopped is no session any more. The end of a process calls what is to be closed with it."""
    lines = finish(
        python("""
        import gc
        from weft.engine import session
        spark = weft.spark()
        frame = spark.range(10)
        child = os.fork()
        if child == 0:
            try:
                frame.count()
            except weft.WeftError as error:
                print(str(error).splitlines()[0], flush=True)
            assert session.running() is None
            frame = None
            gc.collect()
            assert weft.spark() is not spark
            print(weft.spark().range(3).count(), flush=True)
            weft.spark().stop()
            assert session.running() is None
            session.stop()
            os._exit(0)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            assert frame.count() == 10
            time.sleep(0.5)
        print(weft.spark() is spark, frame.count(), flush=True)
        session.at_stop(lambda: print("closed at the end"))
        """)
    )
    assert lines == [
        "This process was forked from one that has a Spark session, which cannot be shared.",
        "3",
        "True 10",
        "closed at the end",
    ]


@pytest.mark.full
def test_a_program_with_much_of_its_own(python: Python, project: Path) -> None:
    """Workers find a module that is on the path of the program alone, its handler of interrupts stays, and nothing of
    Spark is on the terminal: neither of the JVM, nor of the workers, nor of a failing task, nor of an end without a
    stop."""
    (project / "beside").mkdir()
    (project / "beside" / "helpers.py").write_text("def double(number):\n    return 2 * number\n")
    process = python("""
        import asyncio
        sys.path.insert(0, os.path.abspath("beside"))
        import helpers
        def mine(*_):
            pass
        signal.signal(signal.SIGINT, mine)
        def noisy(_):
            print("a worker prints")
            os.write(2, b"and complains\\n")
            raise ValueError("a task fails")
        context = asyncio.run(asyncio.to_thread(weft.spark)).sparkContext
        print(signal.getsignal(signal.SIGINT) is mine)
        print(context.parallelize([1, 2], 2).map(helpers.double).collect())
        try:
            context.parallelize([1], 1).map(noisy).collect()
        except Exception as error:
            print("a task fails" in str(error))
    """)
    assert finish(process) == ["True", "[2, 4]", "True"]
    log = (project / ".weft" / "spark.log").read_text()
    assert "and complains" in log
    assert "a worker prints" in log
    assert "TaskSetManager: Lost task 0.0" in log


@pytest.mark.timing
def test_an_interrupt_cancels_and_a_kill_ends_spark(python: Python, project: Path) -> None:
    """After an interrupt Spark goes on. After a kill of its process it ends."""
    process = python("""
        from weft.engine import session
        def slow(_):
            open("begun", "x").close()
            time.sleep(600)
        context = weft.spark().sparkContext
        try:
            context.parallelize([1], 1).map(slow).collect()
        except KeyboardInterrupt:
            print("interrupted")
        print(weft.spark().range(3).count())
        print(session._running.jvm.process.pid, flush=True)
        time.sleep(600)
    """)
    assert process.stdout is not None
    wait_until((project / "begun").exists, "the task to begin", 60)
    process.send_signal(signal.SIGINT)
    assert [process.stdout.readline() for _ in range(2)] == ["interrupted\n", "3\n"]
    pid = int(process.stdout.readline())
    process.kill()
    wait_until_gone(pid)
    assert process.communicate() == ("", "")


@pytest.mark.full
def test_the_main_thread_leaves_interrupts_to_others_too(python: Python) -> None:
    lines = finish(
        python("""
        def mine(*_):
            pass
        signal.signal(signal.SIGINT, mine)
        weft.spark()
        print(signal.getsignal(signal.SIGINT) is mine)
        """)
    )
    assert lines == ["True"]
