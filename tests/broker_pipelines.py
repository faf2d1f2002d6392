"""What the tests of pipelines from brokers share: messages, and commands in this process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner

from weft.cli import cli


def numbered(*values: int) -> list[bytes]:
    return [json.dumps({"n": n, "text": "é"}).encode() for n in values]


def call(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments, prog_name="weft")
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def shown(*arguments: str) -> Any:
    return json.loads(call(*arguments, "--format", "json"))
