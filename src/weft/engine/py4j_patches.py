"""What Py4J and PySpark's use of it do differently in our sessions."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any


def apply() -> None:
    """Change both for this process, before its first gateway."""
    _quiet_gateway()
    _patch_interrupts()
    _patch_converters()


def _quiet_gateway() -> None:
    """Have Py4J log under its own name. It uses the root logger for calls that are interrupted or lose their JVM, which
    prints them where logging is not set up, and sets it up for the whole process."""
    import py4j.java_gateway as gateway

    if gateway.logging is logging:
        gateway.logging = logging.getLogger("py4j.java_gateway")


def _patch_interrupts() -> None:
    """Have Py4J close a call that is interrupted on this side alone. It asks the JVM to close it too, and that closes,
    a moment later, whatever has the gateway's port: also the connection that the next call has opened meanwhile."""
    from py4j.clientserver import ClientServerConnection

    def shutdown_socket(connection: Any, *_: object) -> None:
        if connection.initiated_from_client:  # else it is the JVM's, which calls functions of ours through it
            connection.close()

    ClientServerConnection.shutdown_socket = shutdown_socket


def _patch_converters() -> None:
    """Have PySpark ask whether a value is one of numpy's without its package for tests, which imports pandas: that took
    as long as all else that a session on a running JVM takes."""
    from pyspark.sql.types import NumpyArrayConverter, NumpyScalarConverter

    def is_scalar(_: object, value: Any) -> bool:
        numpy = sys.modules.get("numpy")
        return numpy is not None and isinstance(value, numpy.generic)

    def is_array(_: object, value: Any) -> bool:
        numpy = sys.modules.get("numpy")
        return numpy is not None and isinstance(value, numpy.ndarray) and value.ndim == 1

    NumpyScalarConverter.can_convert = is_scalar  # type: ignore[method-assign, assignment]
    NumpyArrayConverter.can_convert = is_array  # type: ignore[method-assign, assignment]


def use_own_numbers(gateway: Any) -> None:
    """Number the objects that the JVM calls as no other process does. Each process begins with 0, and a JVM that serves
    several, one after another, reports to the last of them which objects of the others it no longer needs: a streaming
    query would lose what it calls for each batch."""
    gateway.gateway_property.pool.next_id = time.time_ns()


def keep_classes(view: Any) -> None:
    """Have Py4J ask the JVM for each class once. PySpark names them at every use, most by a short name, which the JVM
    looks for in many packages in every jar. An error of Java's, and the end of an iteration over a collection of
    Java's, is compared with 14 classes, each by three such questions."""
    from py4j.java_gateway import JavaClass, JavaPackage, JVMView

    class KeepingView(JVMView):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            member = super().__getattr__(name)
            if isinstance(member, JavaClass):
                setattr(self, name, member)
            return member

    view.__class__ = KeepingView
    client, number = view._gateway_client, view._id
    view.py4j = JavaPackage("py4j", client, number)
    view.py4j.reflection = JavaPackage("py4j.reflection", client, number)
    view.py4j.reflection.TypeUtil = JavaClass("py4j.reflection.TypeUtil", client)
