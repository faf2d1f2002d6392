"""Where Delta tables are: a folder or a bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.systems.endpoint import Endpoint
from weft.systems.objects.local import FolderConnection
from weft.systems.objects.s3 import S3Connection


@dataclass(frozen=True)
class DeltaLocalConnection(FolderConnection):
    """Delta tables in a folder: `DeltaLocalConnection("/data/delta")`. A table is the folder of its name in it."""

    kind: ClassVar[str] = "delta_local"


@dataclass(frozen=True)
class DeltaS3Connection(S3Connection):
    """Delta tables in a bucket: `DeltaS3Connection("my-lake", prefix="delta", region="eu-west-1")`.

    `endpoint` names a server other than Amazon's.
    """

    kind: ClassVar[str] = "delta_s3"


class DeltaEndpoint(Endpoint):
    """A table of a folder or bucket. A source may start at a version."""

    is_source = True
    limit = "max_files"
    places = ("table",)
    prefix_is_table = True
    dead_letters = ("table",)
