"""Where connections are from: `weft.config.connect(url=…)`, and what was registered."""

from weft.project import connect as connect
from weft.project import get_connection as get_connection
from weft.project import register_connection as register_connection
from weft.project import registered_connections as registered_connections

__all__ = ["connect", "get_connection", "register_connection", "registered_connections"]
