"""Which refusals of a server pass by themselves."""

from __future__ import annotations

import pytest

from weft.systems.postgres.sessions import _denies

AT = 'connection failed: connection to server at "password.example.com", port 5432 failed: '


@pytest.mark.parametrize(
    "said",
    [
        f'{AT}FATAL:  password authentication failed for user "app"',
        f'{AT}FATAL:  role "app" does not exist',
        f'{AT}FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "app", database "app", no encryption',
        f'{AT}FATAL:  permission denied for database "app"\nDETAIL:  User does not have CONNECT privilege.',
        f"{AT}fe_sendauth: no password supplied",
        f'{AT}FATAL:  Peer authentication failed for user "app"',
        f'{AT}FATAL:  "trust" authentication failed for user "app"',
        f'{AT}FATAL:  pg_hba.conf rejects connection for host "10.0.0.1", user "app", database "app", no encryption',
        f'{AT}FATAL:  database "app" does not exist',
        f'{AT}FATAL:  role "app" is not permitted to log in',
        f"{AT}FATAL:  no such user: app",
    ],
)
def test_a_denial_stays(said: str) -> None:
    assert _denies(said)


@pytest.mark.parametrize(
    "said",
    [
        f"{AT}Connection refused\n\tIs the server running on that host and accepting TCP/IP connections?",
        f"{AT}FATAL:  the database system is starting up",
        f"{AT}FATAL:  sorry, too many clients already",
        f"{AT}FATAL:  terminating connection due to administrator command",
        f"{AT}FATAL:  canceling authentication due to timeout",
        f'{AT}FATAL:  too many connections for role "authentication"',
        f'{AT}FATAL:  too many connections for role "password authentication failed"',
    ],
)
def test_a_restart_passes(said: str) -> None:
    assert not _denies(said)
