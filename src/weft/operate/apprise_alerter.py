"""Alerts by Apprise: mail, Teams, PagerDuty, Opsgenie and what else its URLs lead to."""

from __future__ import annotations

import logging

from weft.errors import MissingExtraError, NotFoundError, SettingsError, installing, nearest
from weft.operate.alerts import EXAMPLES, Alert, Alerter
from weft.settings import HIDDEN

try:
    import apprise
    from apprise.manager_plugins import NotificationManager
except ImportError as error:
    raise MissingExtraError(f"This needs Apprise, which is not there: {error}.", hint=installing("alerts")) from error

# Apprise logs URLs and answers of servers. Our own logger reports what failed, without them.
logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
_TITLES = {"recovered": "recovered", "leader_changed": "new leader"}


class Apprise(Alerter):
    """A notification for each event."""

    def __init__(self, scheme: str, url: str) -> None:
        self.shown = f"{scheme}://{HIDDEN}"
        known = NotificationManager().schemas()
        if scheme not in known:
            # Among two hundred, some name is a little like any other.
            close = nearest(scheme, sorted(known), likeness=0.7)
            hint = f"Did you mean {close}://? " if close else ""
            raise NotFoundError(
                f"There is no alerter at {scheme}://.", hint=f"{hint}{EXAMPLES} Others are those of Apprise."
            )
        try:
            service = apprise.Apprise.instantiate(url, suppress_exceptions=True)
        except Exception:  # without the cause, which may quote the URL
            service = None
        if service is None:
            raise SettingsError(
                f"Apprise cannot read the URL of the alerter at {scheme}://.",
                hint=f"Its documentation says what a URL at {scheme}:// looks like.",
            )
        self._services = apprise.Apprise()
        self._services.add(service)

    def deliver(self, event: Alert) -> None:
        is_good = event.event == "recovered"
        kind = apprise.NotifyType.SUCCESS if is_good else apprise.NotifyType.FAILURE
        title = f"{event.pipeline}: {_TITLES.get(event.event, event.event.replace('_', ' '))}"
        # It is text: where a service wants HTML, Apprise escapes it.
        text = apprise.NotifyFormat.TEXT
        if not self._services.notify(body=str(event), title=title, notify_type=kind, body_format=text):
            raise OSError("it was not delivered")
