"""Starts each run by an asynchronous call of a function of AWS Lambda: `lambda://function?qualifier=alias`.

The function's handler is `weft.cli.lambda_handler.handler`, with the project's modules beside it. It runs what the
event says, against the run log that all share.
"""

from __future__ import annotations

import json
from urllib.parse import parse_qsl, urlsplit

from weft.errors import ConnectionFailedError, MissingExtraError, SettingsError, installing, listed
from weft.operate.executors import Dispatch

_OPTIONS = ("qualifier", "region", "endpoint")
_EXAMPLE = "lambda://run-pipelines?qualifier=live"


class Invoked:
    """A call that Lambda took. Only the run log knows how it ends."""

    def ended(self) -> int | None:
        return None


class LambdaExecutor:
    """Starts runs by calls of one function."""

    def __init__(self, url: str) -> None:
        split = urlsplit(url)
        options = dict(parse_qsl(split.query, keep_blank_values=True))
        for name in options:
            if name not in _OPTIONS:
                hint = listed(name, _OPTIONS, f"It takes: {', '.join(_OPTIONS)}.")
                raise SettingsError(f"lambda:// takes no option {name!r}.", hint=hint)
        self.function, self.qualifier = split.netloc, options.get("qualifier")
        if not self.function or split.path.strip("/"):
            raise SettingsError("lambda:// needs the name of a function.", hint=_EXAMPLE)
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise MissingExtraError(
                f"lambda:// needs boto3, which is not there: {error}.", hint=installing("executor-lambda")
            ) from error
        limits = Config(connect_timeout=5, read_timeout=10, retries={"max_attempts": 3, "mode": "standard"})
        try:
            self.client = boto3.client(
                "lambda", region_name=options.get("region"), endpoint_url=options.get("endpoint"), config=limits
            )
        except Exception as error:  # no region
            raise SettingsError(f"Lambda cannot be called: {error}", hint=f"{_EXAMPLE}&region=eu-west-1") from None

    def start(self, dispatch: Dispatch) -> Invoked:
        from botocore.exceptions import BotoCoreError, ClientError

        event = {"arguments": dispatch.arguments, "environment": dispatch.environment}
        qualifier = {} if self.qualifier is None else {"Qualifier": self.qualifier}
        try:
            self.client.invoke(
                FunctionName=self.function, InvocationType="Event", Payload=json.dumps(event).encode(), **qualifier
            )
        except (BotoCoreError, ClientError) as error:
            raise ConnectionFailedError(f"Lambda did not take the run of {dispatch.pipeline}: {error}") from None
        return Invoked()
