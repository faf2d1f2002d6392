"""Servers that speak the protocols of Azure Blob Storage, of Google Cloud Storage and of S3. `make faults` installs
them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import servers

CACHE = Path(__file__).parent.parent / ".cache" / "servers"
ACCOUNT = "devstoreaccount1"
# The key that Azurite has for its account, of which its documentation tells everybody.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class _ObjectServer(servers.Server):
    user = "root"

    @classmethod
    def search_path(cls) -> list[str]:
        return [str(CACHE / "bin"), str(CACHE / "node_modules" / ".bin")]

    def initialise(self) -> None:
        pass

    def connect(self, database: str | None = None) -> Any:
        return socket.create_connection(("127.0.0.1", self.port), timeout=5)

    def url(self, database: str | None = None) -> str:
        return f"http://127.0.0.1:{self.port}"


class AzuriteServer(_ObjectServer):
    name = "Azurite"
    package = "nodejs npm"

    @classmethod
    def programs(cls) -> list[str]:
        return ["azurite-blob"]

    def command(self) -> list[str]:
        at = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", str(self.folder)]
        return [self.program, *at, "--skipApiVersionCheck", "--silent"]

    def create_container(self) -> str:
        """Make an empty container and give its name: a PUT that is signed as Azure wants it."""
        name = f"container-{next(self.numbers)}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        asked = [f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
        signed = "\n".join(["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items()), *asked])
        digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        url = f"{self.url()}/{ACCOUNT}/{name}?restype=container"
        urlopen(Request(url, method="PUT", headers=headers)).close()
        return name


class FakeGcsServer(_ObjectServer):
    name = "fake-gcs-server"
    package = "golang-go"

    @classmethod
    def programs(cls) -> list[str]:
        return ["fake-gcs-server"]

    def command(self) -> list[str]:
        at = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(self.port)]
        return [self.program, *at, "-backend", "memory", "-public-host", f"127.0.0.1:{self.port}"]

    def create_bucket(self) -> str:
        """Make an empty bucket and give its name."""
        name = f"bucket-{next(self.numbers)}"
        body, headers = f'{{"name": "{name}"}}'.encode(), {"Content-Type": "application/json"}
        urlopen(Request(f"{self.url()}/storage/v1/b?project=none", body, headers, method="POST")).close()
        return name


class SeaweedServer(_ObjectServer):
    """Another S3 than moto's, which checks no signature where nobody has a key."""

    name = "SeaweedFS"
    package = "uv"

    @classmethod
    def search_path(cls) -> list[str]:
        return [str(CACHE / "seaweedfs" / "bin")]

    @classmethod
    def programs(cls) -> list[str]:
        return ["weed"]

    def command(self) -> list[str]:
        ports = [f"-s3.port={self.port}"]
        for part in ("master", "volume", "filer", "s3"):
            ports.append(f"-{part}.port.grpc={servers.free_port()}")
            if part != "s3":
                ports.append(f"-{part}.port={servers.free_port()}")
        # Its catalogues have fixed ports, which the server of another process may have.
        ports += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        # Each bucket takes seven volumes.
        place = [f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=5000"]
        # Else it would take the key of the test that restarts it for that of everybody.
        plain = ["env", "-u", "AWS_ACCESS_KEY_ID", "-u", "AWS_SECRET_ACCESS_KEY", self.program]
        return [*plain, "server", "-filer", "-s3", "-master.volumeSizeLimitMB=64", *place, *ports]

    def connect(self, database: str | None = None) -> Any:
        # Its port answers before its filer does.
        urlopen(f"{self.url()}/", timeout=5).close()
        return super().connect()

    def create_bucket(self) -> str:
        """Make an empty bucket and give its name."""
        name = f"bucket-{next(self.numbers)}"
        urlopen(Request(f"{self.url()}/{name}", method="PUT")).close()
        return name


servers.KINDS |= {"azure": AzuriteServer, "gcs": FakeGcsServer, "seaweed": SeaweedServer}
