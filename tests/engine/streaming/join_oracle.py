"""What a join must emit, computed in plain Python of the same batches."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from engine.streaming.window_oracle import ERAS, PAUSES, SECOND, Progress


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
    pauses: list[int] = field(default_factory=list)
    """How many seconds pass after each batch."""

    @classmethod
    def random(cls, seed: int, kind: str, keys: int = 0) -> Case:
        """With more keys there are more rows, in the same time: each key is as a case of its own."""
        chance, apart = random.Random(seed), random.Random(f"{seed} apart")
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
            for _ in range(chance.choice([0, 1, 5, 20]) * max(keys, 1)):
                side = chance.randrange(2)
                later = chance.choice([0, SECOND, 4 * SECOND]) + chance.choice([0, 0, chance.randrange(SECOND)])
                reached[side] += later // max(keys, 1)
                behind = chance.choice([0, 0, 0, 2, 30, 200]) * SECOND
                key = chance.choice([None, "x", "x", "y", "", *map(str, range(keys))])
                batch.append(Row(side, reached[side] - behind, key, number))
                number += 1
            silent = apart.choice([None, 0, 1])  # a side that says nothing for once
            case.batches.append([each for each in batch if each.side != silent])
            case.pauses.append(apart.choice(PAUSES))
        return case


@dataclass
class Oracle:
    """What a case has emitted, batch by batch. It keeps all rows for good."""

    case: Case
    rows: dict[Any, list[Row]] = field(default_factory=lambda: defaultdict(list))
    """By key."""
    late: int = 0
    """How many rows of the last batch were late."""
    emitted: Counter[tuple[int | None, int | None]] = field(default_factory=Counter)
    """The numbers of the left and the right row."""
    paired: set[int] = field(default_factory=set)
    alone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.progress = Progress((0, 1), self.case.lateness)

    def add(self, batch: list[Row]) -> None:
        case, before, self.late = self.case, self.progress.watermark, 0
        for row in batch:
            if before is not None and row.at < before - case.allowed:
                self.late += 1
                continue
            for other in self.rows[row.key]:
                left, right = (row, other) if row.side == 0 else (other, row)
                if other.side == row.side or row.key is None:
                    continue
                if case.least <= right.at - left.at <= case.most:
                    self.emitted[left.number, right.number] += 1
                    self.paired |= {left.number, right.number}
            self.rows[row.key].append(row)
        self.progress.add({side: max(row.at for row in batch if row.side == side) for side in {r.side for r in batch}})
        watermark = self.progress.watermark
        if watermark is None:
            return
        for row in itertools.chain.from_iterable(self.rows.values()):
            is_kept = case.kind in (("left_outer", "right_outer")[row.side], "full_outer")
            last = row.at + (case.most if row.side == 0 else -case.least)
            if is_kept and last < watermark - case.allowed and row.number not in self.paired | self.alone:
                self.alone.add(row.number)
                self.emitted[(row.number, None) if row.side == 0 else (None, row.number)] += 1
