"""Tests of shards on a second server that speaks Kinesis: its sequence numbers have 56 digits, as Amazon's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kinesis_streams import Kinesis
from tests.systems.kinesis import test_shards as shards
from weft.systems.kinesis import shards as module

TESTS = (
    shards.test_batches_are_bounded,
    shards.test_a_batch_again,
    shards.test_a_shard_that_is_split_and_merged,
    shards.test_a_split_at_any_moment,
    shards.test_a_run_over_what_is_there,
    shards.test_records_that_are_too_large,
    shards.test_an_end_without_records,
    shards.test_a_stream_that_does_not_exist,
)


@pytest.fixture(scope="session")
def kinesis(shared_server: Callable[[str], Any]) -> Kinesis:
    pytest.importorskip("boto3")
    return Kinesis(shared_server("kinesis"))


@pytest.mark.full
@pytest.mark.parametrize("test", TESTS, ids=lambda each: each.__name__)
def test_shards(
    test: Callable[[Any, Any], None], kinesis: Any, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.0)
    test(kinesis, connection)
