"""The jars that Spark needs beyond its own: locked, fetched once into a cache, and handed over as files.

Spark could resolve packages by itself, but does so at each start, brings a second Hadoop and a second Parquet onto the
class path, and takes whatever the repository serves. A lock (`locks/<capability>.lock`) names each artifact with
its size and sha256, so that every machine runs the same bytes, and a copy of the cache works without a network.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies
from xml.sax.saxutils import quoteattr

from weft.engine import trust_store
from weft.engine.java import find_java
from weft.errors import MissingExtraError, installing, unknown

Progress = Callable[[str, int, int], None]
"""Called with the name of an artifact, how many are there already, and how many are wanted."""

# Asks for the jar alone: the poms of 36 artifacts and of their parents take longer than the jars. Its own checksums are
# left out because ours are checked.
_SETTINGS = """<ivysettings>
  <settings defaultResolver="central"/>
  <property name="ivy.checksums" value=""/>
  <resolvers><ibiblio name="central" m2compatible="true" usepoms="false" useMavenMetadata="false"/></resolvers>
</ivysettings>
"""
_LINE = re.compile(r"([^:\s]+):([^:\s]+):(\S+) ([0-9]+) sha256:([0-9a-f]{64})")
_WORK = "fetching-"
# Ivy runs for a few seconds: with Java's own choice of compilers and collector it takes a fifth more processor time.
_QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


@dataclass(frozen=True)
class Jar:
    """One artifact of a lock."""

    group: str
    artifact: str
    version: str
    size: int
    sha256: str

    @property
    def file(self) -> str:
        """The name of the file in the cache."""
        return f"{self.artifact}-{self.version}.jar"

    def is_in(self, folder: Path) -> bool:
        """Whether the file is there, whole. Its sum was checked when it came; `weft jars verify` checks it again."""
        try:
            return (folder / self.file).stat().st_size == self.size
        except OSError:
            return False

    def is_intact(self, folder: Path) -> bool:
        """Return whether the file is there and has the bytes that the lock names."""
        return self.is_in(folder) and _sha256(folder / self.file) == self.sha256


def cache_folder() -> Path:
    """Where what Weft fetches or makes for itself is kept: WEFT_CACHE, else `weft` in the user's cache folder."""
    if folder := os.environ.get("WEFT_CACHE"):
        return Path(folder).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of XDG says to ignore a relative path.
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "weft"


def jars_folder() -> Path:
    """Return the folder of the jars: a copy of this folder is all that a machine without a network needs."""
    return cache_folder() / "jars"


@cache
def capabilities() -> tuple[str, ...]:
    """Return the names of the sets of jars that have a lock."""
    names = (each.name for each in (files("weft.engine") / "locks").iterdir())
    return tuple(sorted(name.removesuffix(".lock") for name in names if name.endswith(".lock")))


@cache
def locked(capability: str) -> tuple[Jar, ...]:
    """Return the artifacts of one capability."""
    if capability not in capabilities():
        raise unknown("set of jars", capability, capabilities())
    return read_lock((files("weft.engine") / "locks" / f"{capability}.lock").read_text(encoding="utf-8"))


def read_lock(text: str) -> tuple[Jar, ...]:
    """Return the artifacts that a lock names, one a line."""
    jars = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            parts = _LINE.fullmatch(line)
            if parts is None:
                raise ValueError(f"{line!r} in a lock of jars is not an artifact")
            group, artifact, version, size, sha256 = parts.groups()
            jars.append(Jar(group, artifact, version, int(size), sha256))
    return tuple(jars)


def jars_for(capability: str, *, lock: tuple[Jar, ...] | None = None) -> list[Path]:
    """The files of a capability ("delta", "s3", "kafka"), or of another lock, fetched if they are not in the cache."""
    folder, wanted = jars_folder(), lock or locked(capability)
    if not all(jar.is_in(folder) for jar in wanted):
        fetch(capability, lock=wanted, progress=_show_progress(capability))
    return [folder / jar.file for jar in wanted]


def fetch(capability: str, *, lock: tuple[Jar, ...] | None = None, progress: Progress | None = None) -> int:
    """Put into the cache what it lacks of a capability; how many artifacts came. Processes that want the same wait."""
    folder, wanted = jars_folder(), lock or locked(capability)
    try:
        with locked_folder(folder):
            missing = [jar for jar in wanted if not jar.is_intact(folder)]
            if missing:
                _sweep(folder)
                with tempfile.TemporaryDirectory(prefix=_WORK, dir=folder) as work:
                    _retrieve(capability, missing, Path(work), progress or (lambda *_: None))
                    for jar in missing:
                        # A rename: another process sees no file or all of it.
                        os.replace(Path(work) / "out" / jar.file, folder / jar.file)
    except OSError as error:
        raise _failed(capability, f"{folder} cannot be written: {error.strerror or error}.") from None
    return len(missing)


def damaged(capability: str) -> list[tuple[Jar, str]]:
    """Return what is wrong with the cached files of a capability, each "missing" or "changed"."""
    folder = jars_folder()
    return [
        (jar, "changed" if (folder / jar.file).exists() else "missing")
        for jar in locked(capability)
        if not jar.is_intact(folder)
    ]


def _retrieve(capability: str, jars: list[Jar], work: Path, progress: Progress) -> None:
    """Download with the Ivy that comes with Spark, which knows mirrors and sign-ins from its users' settings."""
    wanted = "".join(
        f"<dependency org={quoteattr(jar.group)} name={quoteattr(jar.artifact)} rev={quoteattr(jar.version)}"
        ' transitive="false"/>\n'
        for jar in jars
    )
    (work / "ivy.xml").write_text(
        f'<ivy-module version="2.0"><info organisation="weft" module="{capability}"/>\n'
        f"<dependencies>\n{wanted}</dependencies></ivy-module>\n"
    )
    (work / "ivysettings.xml").write_text(_SETTINGS)
    lines = _ivy(capability, work, [], len(jars), progress)
    if any("PKIX path building failed" in line for line in lines):
        # Behind a proxy with a certificate of its own: pip works, so use the certificates that Python trusts.
        lines = _ivy(capability, work, trust_store.java_options(work / "trust_store.jks"), len(jars), progress)
    for jar in jars:
        if not (work / "out" / jar.file).exists():
            raise _failed(capability, _reason(lines) or f"{jar.group}:{jar.artifact}:{jar.version} was not found.")
        if not jar.is_intact(work / "out"):
            raise _failed(
                capability,
                f"What was downloaded as {jar.file} is not the locked file: its sha256 is "
                f"{_sha256(work / 'out' / jar.file)}, not {jar.sha256}.",
            )


def _ivy(capability: str, work: Path, options: list[str], wanted: int, progress: Progress) -> list[str]:
    command = [
        *(str(find_java().executable), *_QUICK, *_proxy_options(), *options, "-jar", _ivy_jar(capability)),
        *("-settings", str(_users_settings() or work / "ivysettings.xml")),
        *("-ivy", str(work / "ivy.xml"), "-types", "jar", "-cache", str(work / "cache")),
        *("-retrieve", f"{work}/out/[artifact]-[revision].[ext]"),
    ]
    lines: list[str] = []
    done = 0
    with subprocess.Popen(
        command, cwd=work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith("downloading "):
                progress(line.split()[1].rpartition("/")[2], done, wanted)
                done += 1
    if process.returncode == 0:
        progress("", wanted, wanted)
    return lines


def _reason(lines: Iterable[str]) -> str:
    """Return what Ivy says went wrong, in one line, without the addresses of repositories: they may hold a password."""
    lines = [line for line in lines if line]
    for line in lines:
        if error := re.search(r"\(([\w.]*(?:Exception|Error)): (.*)\)$", line):
            return f"{error[1].rpartition('.')[2]}: {re.sub(r'[a-z]+://[^ ]+', '…', error[2])}"
    for line in lines:
        if missing := re.match(r":: (\S+): (not found|.*)", line):
            return f"{missing[1].replace('#', ':').replace(';', ':')}: {missing[2]}."
    return ""


def _failed(capability: str, why: str) -> MissingExtraError:
    return MissingExtraError(
        f"The jars for {capability} cannot be fetched: {why}",
        hint=f"Try again where there is a network: weft jars fetch {capability}. Its folder ({jars_folder()}) may be "
        "copied from another machine. A mirror is set in ~/.ivy2/ivysettings.xml, or in the file that "
        "WEFT_IVY_SETTINGS names.",
    )


def _users_settings() -> Path | None:
    named = os.environ.get("WEFT_IVY_SETTINGS")
    path = Path(named or "~/.ivy2/ivysettings.xml").expanduser()
    return path if path.exists() or named else None


def _proxy_options() -> list[str]:
    """Return the options of Java for the proxy of the environment."""
    options = []
    for scheme, address in getproxies().items():
        if scheme in ("http", "https"):
            parts = urlsplit(address if "://" in address else f"http://{address}")
            if parts.hostname:
                options += [f"-D{scheme}.proxyHost={parts.hostname}", f"-D{scheme}.proxyPort={parts.port or 80}"]
    if options and (without := getproxies().get("no")):
        hosts = (host.strip() for host in without.split(",") if host.strip())
        options.append("-Dhttp.nonProxyHosts=" + "|".join(f"*{h}" if h.startswith(".") else h for h in hosts))
    return options


def _ivy_jar(capability: str) -> str:
    spec = find_spec("pyspark")
    jars = sorted(Path(spec.origin).parent.glob("jars/ivy-*.jar")) if spec is not None and spec.origin else []
    if not jars:
        raise MissingExtraError(
            f"The jars for {capability} are fetched by a part of Spark, and pyspark is not installed.",
            hint=installing("spark"),
        )
    return str(jars[0])


@contextmanager
def locked_folder(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Make a folder, and hold its lock, which ends with its process. Without `wait`, raise an OSError where another
    process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _sweep(folder: Path) -> None:
    """Remove what killed processes left. The lock is held, so no other process uses it."""
    for each in folder.glob(f"{_WORK}*"):
        shutil.rmtree(each, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _show_progress(capability: str) -> Progress:
    """Return what shows a fetch that nobody asked for by name: in place on a terminal, else one line."""
    is_shown = False

    def show(name: str, done: int, wanted: int) -> None:
        nonlocal is_shown
        if sys.stderr.isatty():
            end = "" if done < wanted else "\n"
            print(
                f"\r\x1b[KFetching jars for {capability}: {done}/{wanted} {name}", end=end, file=sys.stderr, flush=True
            )
        elif not is_shown:
            print(f"Fetching {wanted} jars for {capability} into {jars_folder()}, once", file=sys.stderr, flush=True)
        is_shown = True

    return show
