"""Dead letters in a topic of Pub/Sub, which a subscription keeps: who reads them takes them, and gives them back.

A letter that another process holds cannot be acknowledged, and Pub/Sub does not say that it is held. So another
message marks it as removed, for when it comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from weft.errors import NotFoundError
from weft.systems.dead_letter_store import StoredLetter, as_json, decoded
from weft.systems.pubsub.client import Outgoing, PubSubClient, client
from weft.systems.pubsub.connection import PubSubConnection

_LEASE_SECONDS = 600
# Pub/Sub does not say how much there is: when it gave nothing for so long, that was all.
_QUIET_SECONDS = 1.0
_LETTER, _REMOVED = "weft-letter-id", "weft-removed-letter-id"


class PubSubLetters:
    """The dead letters in one topic. One that is put twice is there twice, and its reader yields both."""

    takes_messages = True

    def __init__(self, connection: PubSubConnection, place: str, pipeline: str, spark: Callable[[], Any]) -> None:
        self._connection, self._topic = connection, place
        self.name = f"topic {place} of {connection.label}"

    @property
    def _client(self) -> PubSubClient:
        return client(self._connection)

    @cached_property
    def _subscription(self) -> str:
        """The subscription that has the topic's name, or the only one."""
        names = self._client.subscriptions_of(self._topic)
        own = [each for each in names if each.rpartition("/")[2] == self._topic.rpartition("/")[2]]
        if len(own or names) == 1:
            return (own or names)[0]
        problem = f"has {len(names)} subscriptions" if names else "has no subscription, so letters would be lost"
        name = self._topic.rpartition("/")[2]
        raise NotFoundError(
            f"The topic {name!r} of {self._connection.label} {problem}. Dead letters are read from the one that has "
            "the name of the topic.",
            hint=f"Make it: gcloud pubsub subscriptions create {name} --topic={name} --expiration-period=never",
        )

    def check(self) -> None:
        _ = self._subscription  # a topic without one keeps nothing

    def put(self, letters: Sequence[StoredLetter]) -> None:
        self.check()
        sent = [Outgoing(as_json(each.record()).encode(), {_LETTER: each.letter_id}) for each in letters]
        self._client.send(self._topic, sent)

    def records(self) -> Iterator[Mapping[str, Any]]:
        with self._taken() as received:
            removed = _ids(received, _REMOVED)
            letters = [each.message for each in received if _REMOVED not in each.message.attributes]
        yield from (decoded(each.data) for each in letters if each.attributes.get(_LETTER) not in removed)

    def remove(self, ids: Collection[str]) -> None:
        """Acknowledge letters, so that the subscription forgets them; mark those that it does not give."""
        with self._taken() as received:
            marked = _ids(received, _REMOVED)
            missing = {*ids} - marked - _ids(received, _LETTER)
            # Before others are forgotten: a removal that fails is tried again as a whole.
            self._client.send(self._topic, [Outgoing(b"{}", {_REMOVED: each}) for each in sorted(missing)])
            gone = marked.union(ids)
            ack_ids = [each.ack_id for each in received if each.message.attributes.get(_LETTER) in gone]
            self._client.acknowledge(self._subscription, ack_ids)

    @contextmanager
    def _taken(self) -> Iterator[list[Any]]:
        """Take all messages for as long as the block runs; those that it does not acknowledge are given back."""
        received: dict[str, Any] = {}
        quiet_since = time.monotonic()
        try:
            while time.monotonic() - quiet_since < _QUIET_SECONDS:
                pulled = self._client.pull(self._subscription, 1000, waits=False)
                if not pulled:
                    time.sleep(_QUIET_SECONDS / 10)
                    continue
                self._client.extend(self._subscription, [each.ack_id for each in pulled], _LEASE_SECONDS)
                # Keyed by message: a redelivered one is acknowledged by its last delivery.
                received |= {each.message.message_id: each for each in pulled}
                quiet_since = time.monotonic()
            yield list(received.values())
        finally:
            self._client.extend(self._subscription, [each.ack_id for each in received.values()], 0)


def _ids(received: Iterable[Any], attribute: str) -> set[str]:
    return {each.message.attributes[attribute] for each in received if attribute in each.message.attributes}
