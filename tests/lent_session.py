"""The JVM of the test's own Spark session, lent to a process that the test starts.

with lent_session() as variables:
    warm_python.run([…], env={**os.environ, **variables})

A JVM of its own would take such a process most of its time. Weft uses the lent one where it would start one. It stays
when the process is killed; what the process left in it is ended then. For one process at a time. A test that has no
session lends nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "WEFT_TEST_JVM"


@contextmanager
def lent_session() -> Iterator[dict[str, str]]:
    """Variables for the process."""
    from py4j.java_gateway import JavaObject

    from weft.engine import jvm, session

    running = session._running
    if running is None or not isinstance(running.jvm, jvm.Jvm):
        yield {}
        return
    machine = {"port": running.jvm.port, "secret": running.jvm.secret, "pid": running.jvm.process.pid}
    try:
        yield {_VARIABLE: json.dumps(machine)}
    finally:
        own = running.session._jsparkSession
        for query in own.sharedState().activeStreamingQueries().values():
            if query is not None:  # it has ended meanwhile
                query.stop()
        running.context._jvm.SparkSession.setDefaultSession(own)  # type: ignore[union-attr]
        # The JVM calls functions of the last process that asked for it.
        if running.gateway.__dict__.get("_callback_server") is not None:
            server = JavaObject("GATEWAY_SERVER", running.gateway._gateway_client)
            server.resetCallbackClient(server.getCallbackClient().getAddress(), running.gateway._python_proxy_port)


def borrow() -> None:
    """In the process: use what was lent, if anything was."""
    if _VARIABLE in os.environ:
        from weft.engine import session, warm

        machine = json.loads(os.environ.pop(_VARIABLE))
        session._borrowed = lambda _: session.attach(warm.LentJvm(**machine))
