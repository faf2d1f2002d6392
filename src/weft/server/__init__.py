"""The service: streams over HTTP and Server-Sent Events."""

from weft.server.app import app
from weft.server.limits import Limits

__all__ = ["Limits", "app"]
