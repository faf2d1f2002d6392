"""What a join must emit, computed in plain Python of the same batches."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from engine.streaming.window_oracle import ERAS, SECOND


@dataclass(frozen=True)
class Row:
    side: int
    at: int
    """In microseconds."""
    key: Any
    number: int


@dataclass
class Case:
    """One random case: a join, and batches with rows that come in disorder, late or not at all."""

    seed: int
    kind: str
    least: int
    most: int
    lateness: int
    allowed: int
    late_data: str
    batches: list[list[Row]] = field(default_factory=list)

    @classmethod
    def random(cls, seed: int, kind: str) -> Case:
        chance = random.Random(seed)
        least, most = chance.choice([(-5, 5), (0, 10), (3, 8), (-9, -2), (0, 0), (-60, 60)])
        late_data = chance.choice(["drop", "drop", "reopen"])
        allowed = chance.choice([0, 10, 60]) if late_data == "reopen" else 0
        lateness = chance.choice([0, 0, 3, 20])
        times = (each * SECOND for each in (least, most, lateness, allowed))
        case = cls(seed, kind, *times, late_data)
        first = ERAS[seed % 3] + chance.randrange(-100, 100) * SECOND
        reached = [first, first + chance.choice([0, 0, 4, -4, 50]) * SECOND]
        number = 0
        for _ in range(chance.randrange(1, 7)):
            batch = []
            for _ in range(chance.choice([0, 1, 5, 20])):
                side = chance.randrange(2)
                reached[side] += chance.choice([0, SECOND, 4 * SECOND]) + chance.choice(
                    [0, 0, chance.randrange(SECOND)]
                )
                behind = chance.choice([0, 0, 0, 2, 30, 200]) * SECOND
                key = chance.choice([None, "x", "x", "y", ""])
                batch.append(Row(side, reached[side] - behind, key, number))
                number += 1
            case.batches.append(batch)
        return case


@dataclass
class Oracle:
    """What a case has emitted, batch by batch. It keeps all rows for good."""

    case: Case
    watermark: int | None = None
    newest: dict[int, int] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    emitted: Counter[tuple[int | None, int | None]] = field(default_factory=Counter)
    """The numbers of the left and the right row."""
    paired: set[int] = field(default_factory=set)
    alone: set[int] = field(default_factory=set)

    def add(self, batch: list[Row]) -> None:
        case, before = self.case, self.watermark
        for row in batch:
            self.newest[row.side] = max(row.at, self.newest.get(row.side, row.at))
            if before is not None and row.at < before - case.allowed:
                continue
            for other in self.rows:
                left, right = (row, other) if row.side == 0 else (other, row)
                if other.side == row.side or row.key is None or row.key != other.key:
                    continue
                if case.least <= right.at - left.at <= case.most:
                    self.emitted[left.number, right.number] += 1
                    self.paired |= {left.number, right.number}
            self.rows.append(row)
        if len(self.newest) == 2:
            reached = min(self.newest.values()) - case.lateness
            self.watermark = reached if before is None else max(before, reached)
        if self.watermark is None:
            return
        for row in self.rows:
            is_kept = case.kind in (("left_outer", "right_outer")[row.side], "full_outer")
            last = row.at + (case.most if row.side == 0 else -case.least)
            if is_kept and last < self.watermark - case.allowed and row.number not in self.paired | self.alone:
                self.alone.add(row.number)
                self.emitted[(row.number, None) if row.side == 0 else (None, row.number)] += 1
