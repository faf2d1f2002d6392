"""The object store that a URL names."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

from weft.errors import MissingExtraError, SettingsError, installing, listed
from weft.systems.object_stores.objects import Objects

SCHEMES = {
    "s3": "s3://bucket/prefix",
    "gcs": "gcs://bucket/prefix",
    "azureblob": "azureblob://account/container/prefix",
}
"""The schemes of the stores, each with the form of its URL."""
_ALIASES = {"gs": "gcs", "azure": "azureblob", "az": "azureblob"}
_OPTIONS = {"s3": ("region", "endpoint"), "gcs": ("endpoint",), "azureblob": ("endpoint",)}


def is_object_store(scheme: str) -> bool:
    """Return whether URLs of a scheme name an object store."""
    return _ALIASES.get(scheme, scheme) in SCHEMES


def open_objects(url: str) -> Objects:
    """Open the objects at a URL. Credentials are those of the environment, as every client of the store takes them."""
    split = urlsplit(url)
    kind = _ALIASES.get(split.scheme, split.scheme)
    form, known = SCHEMES[kind], _OPTIONS[kind]
    options = dict(parse_qsl(split.query, keep_blank_values=True))
    for name in options:
        if name not in known:
            raise SettingsError(
                f"{form} takes no option {name!r}.", hint=listed(name, known, f"It takes: {', '.join(known)}.")
            )
    if split.username or split.password:
        raise SettingsError(f"{form} takes no user or password.", hint="Set the credentials in the environment.")
    place, prefix = split.netloc, unquote(split.path).strip("/")
    container = ""
    if kind == "azureblob":
        container, _, prefix = prefix.partition("/")
    if not place or (kind == "azureblob" and not container):
        needed = "an account and a container" if kind == "azureblob" else "a bucket"
        raise SettingsError(f"The URL of {kind}:// names {needed}.", hint=f"Write {form}.")
    shown = f"{kind}://{'/'.join(filter(None, (place, container, prefix)))}"
    try:
        if kind == "gcs":
            from weft.systems.object_stores.by_google import GoogleObjects

            return GoogleObjects(shown, prefix, place, options.get("endpoint"))
        from weft.systems.object_stores.by_obstore import open_azure, open_s3
    except ImportError as error:
        raise MissingExtraError(
            f"{form} needs a package that is not there: {error}.", hint=installing("objects")
        ) from error
    if kind == "azureblob":
        return open_azure(shown, prefix, place, container, options)
    return open_s3(shown, prefix, place, options)
