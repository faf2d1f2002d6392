"""Connections to a folder of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from weft.errors import DeclarationError
from weft.systems.base import Connection, measured


@dataclass(frozen=True)
class FolderConnection(Connection):
    """A folder. A relative path is relative to the working directory at use."""

    one_host: ClassVar[bool] = True

    path: str

    def validate(self) -> None:
        super().validate()
        if not self.path or "://" in self.path:
            raise DeclarationError(
                f"The path of {self.label} must be a folder of this machine.",
                hint=f'For example {type(self).__name__}("/data/lake"). For a bucket there is '
                f"{type(self).__name__.replace('Local', 'S3')}.",
            )

    @property
    def target(self) -> str:
        return self.path

    def resolved(self) -> Self:
        """A copy with the path made absolute, its `${VAR}` references substituted."""
        if self._is_resolved:
            return self
        resolved = super().resolved()
        object.__setattr__(resolved, "path", os.path.abspath(os.path.expanduser(resolved.path)))
        return resolved

    @property
    def root(self) -> str:
        return self.resolved().path

    def check(self) -> dict[str, Any]:
        """List the folder. One that does not exist yet is no failure if it can be created at first use."""
        path = Path(self.root)
        report: dict[str, Any] = {"server": "this machine", "database": str(path)}
        if not path.exists():
            parent = next(each for each in path.parents if each.exists())
            if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
                raise self.failed(OSError(f"the folder cannot be created in {parent}"), hint="Choose another path.")
            return report | {"latency_ms": None, "note": "the folder is created at first use"}
        try:
            with measured(report), os.scandir(path) as files:
                next(files, None)
        except OSError as error:
            raise self.failed(error, hint="Is it a folder that you may read?") from None
        return report
