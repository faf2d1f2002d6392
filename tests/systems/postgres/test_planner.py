"""What loads tell PostgreSQL's planner, unless the server has a setting of its own."""

from __future__ import annotations

import psycopg

import weft
from weft.engine.readers import open_tables


def test_costs_of_a_disk_that_does_not_turn(url: str) -> None:
    def cost(role: str) -> str:
        tables = open_tables(weft.connect(url=url))
        try:
            with tables.driver.session(role) as session:
                return str(session.value("SELECT current_setting('random_page_cost')"))
        finally:
            tables.driver.close()

    assert (cost("publish"), cost("read")) == ("1.1", "4")
    with psycopg.connect(url, autocommit=True) as driver:
        driver.execute(f'ALTER DATABASE "{driver.info.dbname}" SET random_page_cost = 2.5')
    assert cost("publish") == "2.5"
