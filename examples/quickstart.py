"""Declare a stream, publish to it, consume from it."""

import weft


@weft.stream(fields={"user_id": "string", "action": "string"})
def user_events():
    """Never called: it stands for the stream."""


if __name__ == "__main__":
    result = weft.publish_sync("user_events", {"user_id": "u_123", "action": "click"})
    print("stored at offset", result["first_rowid"])

    events = weft.consume_sync("user_events", "analytics_worker")
    for event in events:
        print(event["user_id"], event["action"])
    weft.ack_sync("user_events", "analytics_worker", events)
