"""What `retry=` may say, and the waits that follow from it."""

from __future__ import annotations

from typing import Any

import pytest

from weft.errors import DeclarationError
from weft.pipelines.retry import Retry


def waits(given: dict[str, Any], count: int = 5) -> list[float]:
    retry = Retry.declare(given)
    return [retry.delay(attempt) for attempt in range(1, count + 1)]


def test_as_the_guide_says() -> None:
    given = {"max_attempts": 5, "backoff_seconds": 30, "backoff_factor": 2.0}
    assert waits(given) == [30, 60, 120, 240, 480]
    assert Retry.declare(given).max_attempts == 5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"backoff": "fixed", "base": 10}, [10, 10, 10, 10, 10]),
        ({"backoff": "linear", "base": 10}, [10, 20, 30, 40, 50]),
        ({"backoff": "linear", "base": 10, "cap": 25}, [10, 20, 25, 25, 25]),
        ({"backoff": "exponential", "base": 1, "cap": 5}, [1, 2, 4, 5, 5]),
        ({"backoff_seconds": 1, "backoff_factor": 3, "cap": 20}, [1, 3, 9, 20, 20]),
        ({"backoff_seconds": 0}, [0, 0, 0, 0, 0]),
        ({"max_attempts": 2}, [30, 60, 120, 240, 480]),
    ],
)
def test_waits(given: dict[str, Any], expected: list[float]) -> None:
    assert waits(given) == expected


def test_no_wait_grows_without_end() -> None:
    assert Retry.declare({"max_attempts": 10**6}).delay(10**5) == 86_400
    assert Retry.declare({"base": 10**6}).delay(9) == 10**6


def test_nothing_said_is_one_attempt() -> None:
    assert Retry.declare(None).max_attempts == 1
    assert Retry.declare({}).max_attempts == 3
    assert Retry.declare(Retry(4)) == Retry(4)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"max_atempts": 3}, "no option 'max_atempts'.*\n.*'max_attempts'"),
        ({"backof_seconds": 3}, "'backoff_seconds'"),
        ({"jitter": 1}, "Options: max_attempts"),
        ({"base": 1, "backoff_seconds": 1}, "both base and backoff_seconds"),
        ({"backoff": "fixed", "backoff_factor": 2}, "a fixed backoff has none"),
        ({"backoff": "exponentail"}, "Did you mean 'exponential'"),
        ({"backoff": ["fixed"]}, "It can be 'fixed'"),
        ({"max_attempts": 0}, "from 1 on, not 0"),
        ({"max_attempts": True}, "not True"),
        ({"max_attempts": 2.5}, "not 2.5"),
        ({"base": -1}, "base must be a number from 0 on"),
        ({"base": float("nan")}, "base must be a number"),
        ({"cap": float("inf")}, "cap must be a number"),
        ({"backoff_factor": 0.5}, "from 1 on, not 0.5"),
        ({"backoff_seconds": "30"}, "not '30'"),
        ({"base": 10, "cap": 5}, "below the first wait"),
        (5, "retry must be a dict, not int"),
    ],
)
def test_what_cannot_be(given: Any, says: str) -> None:
    with pytest.raises(DeclarationError, match=says):
        Retry.declare(given)
