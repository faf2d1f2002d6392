"""The log of a run has its messages, whatever other runs do meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from weft.operate.logs import captured, log_file


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield logger
    logger.setLevel(before)


def test_run_that_ends_does_not_silence_another(project: Path, root_logger: logging.Logger) -> None:
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(captured(Path.cwd(), "first", 1))
        second.enter_context(captured(Path.cwd(), "second", 1))
        first.close()
        logging.getLogger("mine").info("said later")
        second.close()
        assert root_logger.level == logging.ERROR

    assert "said later" in log_file(Path.cwd(), "second", 1).read_text()
    assert "said later" not in log_file(Path.cwd(), "first", 1).read_text()


def test_error_in_a_run_sets_the_level_back(project: Path, root_logger: logging.Logger) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError), captured(Path.cwd(), "broken", 1):
            assert root_logger.level == logging.INFO
            raise RuntimeError("not today")
        assert root_logger.level == logging.ERROR
