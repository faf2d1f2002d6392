"""Durable streams: declare, publish, subscribe, consume, acknowledge. Written once over `weft.systems.log`."""

from weft.streams.consuming import ack as ack
from weft.streams.consuming import ack_sync as ack_sync
from weft.streams.consuming import consume as consume
from weft.streams.consuming import consume_sync as consume_sync
from weft.streams.consuming import groups as groups
from weft.streams.consuming import groups_sync as groups_sync
from weft.streams.consuming import nack as nack
from weft.streams.consuming import nack_sync as nack_sync
from weft.streams.consuming import reset as reset
from weft.streams.consuming import reset_sync as reset_sync
from weft.streams.declare import Stream as Stream
from weft.streams.declare import stream as stream
from weft.streams.publishing import publish as publish
from weft.streams.publishing import publish_sync as publish_sync
from weft.streams.retention import delete_stream as delete_stream
from weft.streams.retention import delete_stream_sync as delete_stream_sync
from weft.streams.retention import trim as trim
from weft.streams.retention import trim_sync as trim_sync
from weft.streams.runtime import close as close
from weft.streams.subscription import Subscription as Subscription
from weft.streams.subscription import subscribe as subscribe
