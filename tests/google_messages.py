"""Classes of Google's own Protobuf, of which Python has the library and not the compiler of .proto files."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def message_class(name: str, /, **fields: str) -> Any:
    """Return the class of a message whose fields, `id="int64"`, have the numbers 1, 2 … in this order."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", syntax="proto3")
    message = file.message_type.add(name=name)
    for number, (field, kind) in enumerate(fields.items(), 1):
        added = message.field.add(name=field, number=number, label="LABEL_OPTIONAL", type=f"TYPE_{kind.upper()}")
        added.proto3_optional = True
        added.oneof_index = number - 1
        message.oneof_decl.add(name=f"_{field}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
