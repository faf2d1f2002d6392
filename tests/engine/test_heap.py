"""The JVM's heap does not grow with garbage."""

from __future__ import annotations

from typing import Any

from servers import wait_until
from weft.spark_support.heap import Heap


def test_old_garbage_is_collected(plain_spark: Any) -> None:
    jvm, heap = plain_spark._jvm, Heap(plain_spark)
    buffers = [jvm.java.nio.ByteBuffer.allocate(10 << 20) for _ in range(40)]
    jvm.java.lang.System.gc()  # which makes old objects of them
    before = heap.used()
    assert before > 400 << 20
    del buffers

    def is_collected() -> bool:
        Heap(plain_spark).collect()
        return heap.used() < before - (350 << 20)

    wait_until(is_collected, "the JVM to be told that they are garbage")
