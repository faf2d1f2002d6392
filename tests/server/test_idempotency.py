"""`Idempotency-Key` of a publish over HTTP."""

from __future__ import annotations

from typing import Any

from weft.project import Project
from workers import declare

URL = "/api/v1/streams/orders"


def test_another_body_under_an_old_key(streams: Project, http: Any) -> None:
    declare("orders", fields={"n": "int64"})

    def publish(body: str) -> Any:
        headers = {"content-type": "application/json", "idempotency-key": "k"}
        return http.post(URL, content=body, headers=headers)

    assert publish('[{"n": 1, "x": "a"}, {"n": 2}]').status_code == 202
    assert publish('[ {"x": "a", "n": 1},{"n": 2}]').json()["rows_deduplicated"] == 2
    refused = publish('[{"n": 1, "x": "a"}, {"n": 2}, {"n": 3}]')
    assert refused.status_code == 422
    assert "Nothing was stored" in refused.json()["detail"]
    assert "new key" in refused.json()["hint"]
    assert [each["n"] for each in http.get(f"{URL}/events").json()["events"]] == [1, 2]
