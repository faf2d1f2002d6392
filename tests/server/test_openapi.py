"""`/openapi.json`: it is complete, and the service answers as it says, whatever it is sent."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode, checks
from starlette.routing import Route

from weft.server import app

STREAMS = """
@weft.stream(fields={"id": "int64", "name": "string?", "price": "decimal(10,2)"}, validate_schema=True)
def orders(): ...

@weft.stream(description="Anything")
def clicks(): ...

@weft.stream(fields={"n": "int32"}, on_schema_drift="quarantine", max_deliveries=2)
def numbers(): ...

@weft.stream(auth={"type": "api_key", "header": "X-Shop", "key": "s3cret"})
def closed(): ...
"""
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]
NAMES = ["orders", "clicks", "numbers", "numbers__quarantine", "closed", "nowhere"]


def test_every_route_is_in_it_and_nothing_else(server: Callable[..., Any]) -> None:
    paths = server("@weft.stream\ndef one(): ...").client.get("/openapi.json").json()["paths"]
    told = {(path, method.upper()) for path, item in paths.items() for method in item if method != "parameters"}
    made = {
        (route.path, method)
        for route in app().routes
        if isinstance(route, Route) and route.include_in_schema
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert told == made | {("/api/v1/streams/one", "GET"), ("/api/v1/streams/one", "POST")}


def test_a_stream_that_may_not_be_read_is_not_in_it(server: Callable[..., Any]) -> None:
    client = server(STREAMS).client
    found = client.get("/openapi.json").json()
    assert "/api/v1/streams/orders" in found["paths"]
    assert "closed" not in client.get("/openapi.json").text
    found = client.get("/openapi.json", headers={"x-shop": "s3cret"}).json()
    assert found["paths"]["/api/v1/streams/closed"]["post"]["security"] == [{"header.x-shop": []}, {"key": []}]
    assert found["components"]["securitySchemes"]["header.x-shop"]["name"] == "X-Shop"


def test_fields_of_a_stream(server: Callable[..., Any]) -> None:
    found = server(STREAMS).client.get("/openapi.json").json()["components"]["schemas"]["Event.orders"]
    assert found["required"] == ["id", "price"]
    assert found["properties"]["id"] == {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    assert found["properties"]["name"] == {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.timeout(900)
def test_the_service_answers_as_it_says(
    server: Callable[..., Any], count: Callable[..., int], pytestconfig: pytest.Config
) -> None:
    is_full = pytestconfig.getoption("--full")
    served = server(STREAMS, toml="[server]\nwait_seconds = 0.05\n")
    api = schemathesis.openapi.from_url(served.url + "/openapi.json")
    api.validate()
    operations = [found.ok() for found in api.get_all_operations()]
    assert len(operations) > 20
    pairs = list(itertools.product(operations, GenerationMode))
    # Every fourth operation, in one of the modes by turns: to find out what can be sent takes longer than to send it.
    assert len(GenerationMode) == 2
    for operation, mode in pairs if is_full else [pairs[2 * n + n // 4 % 2] for n in range(0, len(operations), 4)]:

        @given(case=operation.as_strategy(generation_mode=mode), name=st.sampled_from(NAMES))
        @settings(
            max_examples=count(100, 2),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        def check(case: Any, name: str) -> None:
            if "name" in case.path_parameters:
                case.path_parameters["name"] = name
            if case.path.endswith("/subscribe"):
                _check_subscription(case, served.url)
            else:
                case.call_and_validate(base_url=served.url, checks=CHECKS, timeout=60)

        # Nothing can be wrong with a request that has neither parameters nor a body.
        with suppress(Unsatisfiable) if mode is GenerationMode.NEGATIVE else nullcontext():
            check()


def _check_subscription(case: Any, url: str) -> None:
    """An answer that goes on for ever: its beginning is looked at."""
    asked = case.as_transport_kwargs(base_url=url)
    with requests.request(**asked, stream=True, timeout=60) as answer:
        told = case.operation.definition.raw["responses"]
        assert str(answer.status_code) in told and answer.status_code < 500
        if answer.status_code == 200:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert next(answer.iter_lines()) == b": subscribed"
        else:
            assert answer.headers["content-type"] == "application/problem+json"
