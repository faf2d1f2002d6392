"""Dead letters in a subscription that somebody else reads at the same time. Without Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from servers import wait_until
from weft.project import Project
from weft.systems.dead_letter_store import StoredLetter
from weft.systems.pubsub.dead_letters import PubSubLetters


def test_letters_that_somebody_else_holds(pubsub: Any, connection: Any, here: Project) -> None:
    """They are removed for every reader, and forgotten by the next removal that is given them."""
    topic, subscription = pubsub.create_queue()
    more: dict[str, Any] = {"failed_at": datetime.now(UTC), "pipeline": "copies"}
    letters = [StoredLetter("read", "bad", "events", "{", letter_id=f"id{number}", **more) for number in range(3)]

    def store() -> PubSubLetters:
        return PubSubLetters(connection, topic, "copies", lambda: None)

    def ids() -> list[str]:
        return sorted(each["letter_id"] for each in store().records())

    def held(count: int) -> list[Any]:
        """Take so many messages, and give none of them back."""
        found: dict[str, Any] = {}

        def is_enough() -> bool:
            found.update((each.message.message_id, each) for each in pubsub.pull(subscription))
            return len(found) >= count

        wait_until(is_enough, f"{count} messages", 120)
        return list(found.values())

    store().put(letters)
    taken = held(3)
    store().remove(["id1", "unknown"])
    pubsub.give_back(subscription, taken)
    wait_until(lambda: ids() == ["id0", "id2"], "the letters that were given back", 120)
    store().remove(["id2"])
    assert ids() == ["id0"]
    # A mark stays, because Pub/Sub may deliver a letter again that was acknowledged.
    left = {text for each in held(3) for text in each.message.attributes.items()}
    removed = "weft-removed-letter-id"
    assert left == {("weft-letter-id", "id0"), (removed, "id1"), (removed, "unknown")}
