"""Odd messages under SQL of many shapes: each message is in the target with exactly its values, or a dead letter once,
and none stops the pipeline. The types alone are tried at more length in `tests/systems/kafka/test_odd_messages.py`."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

import weft
from engine.streaming.conftest import here, rows, run_once  # noqa: F401 - fixture
from weft.engine.streaming.dead_letters import stream_of

pytest.importorskip("pyspark")
pytestmark = pytest.mark.usefixtures("here", "spark")

Message = dict[str, Any]
ODD: list[Any] = [
    *(None, True, 0, -1.5, 1e300, 2**53 + 1, 2**63, 10**37, 10**40, "", "maybe", "5", "true", "é\x01"),
    *([], {}, [None], [1, "x"], [[1]], ["x"], {"x": "1"}, {"x": None, "z": 1}, {"x": [1]}),
]
SHAPES: dict[str, tuple[str | None, Callable[[Message], Any]]] = {
    "as it is": (None, lambda sent: [sent.get(name) for name in ("amount", "name", "valid")]),
    "filter": ("SELECT id, amount AS value FROM source WHERE valid", lambda sent: sent.get("amount")),
    "arithmetic": ("SELECT id, amount + 1 AS value FROM source", lambda sent: _plus_one(sent.get("amount"))),
    "condition": ("SELECT id, CASE WHEN valid THEN name END AS value FROM source", lambda sent: _named(sent)),
    "text": ("SELECT id, concat(name, '!') AS value FROM source", lambda sent: _exclaimed(sent.get("name"))),
    "cast": ("SELECT id, CAST(name AS BIGINT) AS value FROM source", lambda sent: _number(sent.get("name"))),
    "object": ("SELECT id, o.x AS value FROM source", lambda sent: (sent.get("o") or {}).get("x")),
    "array": ("SELECT id, size(tags) AS value FROM source", lambda sent: _length(sent.get("tags"))),
    "element": ("SELECT id, tags[0] AS value FROM source", lambda sent: (sent.get("tags") or [None])[0]),
    "sum": ("SELECT id, sum(amount) AS value FROM source GROUP BY id", lambda sent: sent.get("amount")),
    "join": (
        "SELECT s.id, s.amount AS value FROM source s LEFT JOIN source t ON s.id = t.id AND t.valid",
        lambda sent: sent.get("amount"),
    ),
}


def _plus_one(amount: Any) -> Any:
    return None if amount is None else amount + 1


def _named(sent: Message) -> Any:
    return sent.get("name") if sent.get("valid") is True else None


def _exclaimed(name: Any) -> Any:
    return None if name is None else f"{name}!"


def _number(name: Any) -> Any:
    return None if name is None else int(name)


def _length(tags: Any) -> Any:
    return None if tags is None else len(tags)


def usual(dice: random.Random, number: int) -> Message:
    return {
        "id": f"m{number}",
        "valid": True,
        "amount": dice.randrange(100),
        "name": str(dice.randrange(100)),
        "tags": [1, 2],
        "o": {"x": dice.randrange(9)},
    }


def odd(dice: random.Random, number: int) -> Message:
    message = usual(dice, number)
    for name in dice.sample(["valid", "amount", "name", "tags", "o", f"extra{dice.randrange(3)}"], dice.choice([1, 2])):
        message[name] = dice.choice(ODD)
    if dice.random() < 0.2:
        del message[dice.choice(["valid", "amount", "name", "tags", "o"])]
    return message


@pytest.mark.brief("filter", "cast")
@pytest.mark.parametrize("shape", SHAPES)
def test_each_message_is_stored_as_it_is_or_a_letter_once(shape: str, kafka: Any, count: Callable[..., int]) -> None:
    sql, expected = SHAPES[shape]
    topic, dice = kafka.create_topic(), random.Random(shape)
    broker = weft.KafkaConnection(name="broker", bootstrap_servers=kafka.bootstrap)
    sent: dict[str, Message] = {}
    plain: set[str] = set()
    for batch in range(count(20, brief=2)):
        messages = [usual(dice, 100 * batch + each) for each in range(12)]
        plain |= {each["id"] for each in messages}
        messages += [odd(dice, 100 * batch + each) for each in range(12, 20)]
        dice.shuffle(messages)
        sent |= {each["id"]: each for each in messages}
        kafka.produce(topic, [json.dumps(each).encode() for each in messages])
        run_once(
            name="odd",
            source=broker,
            source_query=topic,
            target_table=(None, "copies"),
            transform_sql=sql,
            transform_on_error=None if sql is None else "dlq",
            dead_letter_stream="failed",
        )
    letters = weft.consume_sync(stream_of("failed", None), "me", batch_size=len(sent))
    found = Counter(json.loads(each["payload"])["id"] for each in letters)
    stored = rows("copies", "id, amount, name, valid" if sql is None else "id, value")
    times = found + Counter(name for name, *_ in stored)
    assert not [name for name, many in times.items() if many > 1]
    for name, *values in stored:
        wanted = expected(sent[name])
        for value, each in zip(values, wanted if sql is None else [wanted], strict=True):
            is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
            assert (type(value) is type(each) or is_number) and value == each, (sent[name], value)
    # A filter leaves out what is not valid; nothing else may be missing.
    missing = sent.keys() - times.keys()
    assert all(shape == "filter" and sent[name].get("valid") is not True for name in missing), missing
    assert not plain & found.keys()
