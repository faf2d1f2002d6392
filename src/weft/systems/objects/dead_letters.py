"""Dead letters in files of a folder or bucket."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from weft.systems.dead_letter_files import LetterFiles
from weft.systems.objects.paths import list_files


class FolderLetters(LetterFiles):
    """The dead letters under a path of a folder."""

    def __init__(self, connection: Any, place: str, pipeline: str, spark: Callable[[], Any]) -> None:
        super().__init__(f"{connection.root}/{place.strip('/')}", connection)


class BucketLetters(LetterFiles):
    """The dead letters under a path of a bucket, by Arrow's client: nobody should wait for Spark to see a letter."""

    def __init__(self, connection: Any, place: str, pipeline: str, spark: Callable[[], Any]) -> None:
        super().__init__(f"{connection.root}/{place.strip('/')}", connection)
        self._holder = connection
        self._folder = self.path.partition("://")[2]
        self.name = f"path {self.path.replace('s3a://', 's3://')}"

    @cached_property
    def _client(self) -> Any:
        return self._holder.filesystem()

    def _names(self) -> list[str]:
        names = (path.rpartition("/")[2] for path in list_files(self._holder, self._folder, store=self._client))
        return sorted(name for name in names if name.endswith(".json"))

    def _read(self, name: str) -> bytes | None:
        try:
            with self._client.open_input_stream(f"{self._folder}/{name}") as file:
                data: bytes = file.read()
                return data
        except FileNotFoundError:
            return None

    def _create(self, name: str, data: bytes) -> None:
        if not self._client.get_file_info(f"{self._folder}/{name}").is_file:
            self._replace(name, data)

    def _replace(self, name: str, data: bytes) -> None:
        if not data:
            self._client.delete_file(f"{self._folder}/{name}")
            return
        # An object appears when its last part is there, whole.
        with self._client.open_output_stream(f"{self._folder}/{name}") as file:
            file.write(data)
