"""A private schema registry for the tests: Apicurio, from a locked archive, with its schemas in memory.

    registry = RegistryServer()
    registry.start()
    registry.api        # Confluent's API

Its archive is kept, unpacked, in the cache that Spark's jars are kept in.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tarfile
import tempfile
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

from kafka_server import KafkaServer
from servers import KINDS, MissingServerError, Server

_CENTRAL = "https://repo1.maven.org/maven2"
_QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


class RegistryServer(Server):
    """One node."""

    name = "Apicurio"
    package = "default-jre-headless"
    user = "root"

    @classmethod
    def programs(cls) -> list[str]:
        return ["java"]

    @classmethod
    def search_path(cls) -> list[str]:
        return KafkaServer.search_path()

    def initialise(self) -> None:
        self.jar = _unpacked() / "apicurio-registry-app-3.0.9-runner.jar"

    def command(self) -> list[str]:
        settings = {
            "quarkus.http.host": "127.0.0.1",
            "quarkus.http.port": str(self.port),
            "apicurio.storage.kind": "sql",
            "quarkus.log.level": "WARN",
        }
        return [
            *(self.program, "-Xmx384m", *_QUICK, f"-Djava.io.tmpdir={self.folder}"),
            *(f"-D{name}={value}" for name, value in settings.items()),
            *("-jar", str(self.jar)),
        ]

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def connect(self, database: str | None = None) -> Any:
        # It answers when all of it is there.
        with closing(socket.create_connection(("127.0.0.1", self.port), 1)):
            pass
        return urllib.request.urlopen(f"{self.api}/subjects", timeout=10)

    def url(self, database: str | None = None) -> str:
        return self.api


def _unpacked() -> Path:
    """The folder of the archive, fetched from Maven's repository if it is not there."""
    from weft.engine.jars import cache_folder

    lines = Path(__file__).with_name("registry_server.lock").read_text().splitlines()
    artifact, _, checksum = next(line for line in lines if not line.startswith("#")).split()
    group, name, version = artifact.split(":")
    folder = cache_folder() / f"{name}-{version}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    address = f"{_CENTRAL}/{group.replace('.', '/')}/{name}/{version}/{name}-{version}-all.tar.gz"
    work = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        try:
            with urllib.request.urlopen(address, timeout=60) as answer, (work / "all").open("wb") as file:
                shutil.copyfileobj(answer, file)
        except OSError as error:
            raise MissingServerError("Apicurio, which cannot be downloaded,", "default-jre-headless") from error
        with (work / "all").open("rb") as file:
            assert f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == checksum, f"{address} is another file"
        with tarfile.open(work / "all") as archive:
            archive.extractall(work / "files", filter="data")
        if not folder.exists():  # another process may have been faster
            os.replace(work / "files", folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


KINDS["registry"] = RegistryServer
