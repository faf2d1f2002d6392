"""How often a failed run is tried again, and how long after each failure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from weft.errors import DeclarationError
from weft.options import one_of, refuse_unknown

Backoff = Literal["fixed", "linear", "exponential"]
_BACKOFFS: tuple[str, ...] = get_args(Backoff)
_KEYS = ("max_attempts", "backoff_seconds", "backoff_factor", "backoff", "base", "cap")
_DAY = 86_400.0


@dataclass(frozen=True)
class Retry:
    """`Retry()` does not try again; `Retry.declare({…})` reads what a pipeline says."""

    max_attempts: int = 1
    backoff: Backoff = "exponential"
    base: float = 30.0
    """Seconds after the first failure."""
    factor: float = 2.0
    """Exponential: how many times as long each wait is as the one before."""
    cap: float = _DAY
    """No wait is longer, in seconds."""

    @classmethod
    def declare(cls, options: Mapping[str, Any] | Retry | None) -> Retry:
        """Return what a pipeline's `retry=` says, or raise `DeclarationError`.

        Either `{"max_attempts": 5, "backoff_seconds": 30, "backoff_factor": 2.0}`, or with `backoff` (fixed, linear or
        exponential) and `base` in the place of the last two. `cap` goes with both. Without `max_attempts` there are 3.
        """
        if options is None:
            return cls()
        if isinstance(options, Retry):
            return options
        if not isinstance(options, Mapping):
            raise DeclarationError(
                f"retry must be a dict, not {type(options).__name__}.", hint=f"Options: {', '.join(_KEYS)}."
            )
        refuse_unknown({str(key): value for key, value in options.items()}, _KEYS, "retry")
        if "base" in options and "backoff_seconds" in options:
            raise DeclarationError("retry has both base and backoff_seconds, which mean the same.", hint="Keep one.")
        backoff = one_of(options.get("backoff", "exponential"), _BACKOFFS, "backoff", "retry")
        if "backoff_factor" in options and backoff != "exponential":
            raise DeclarationError(
                f"retry has a backoff_factor, and a {backoff} backoff has none.",
                hint="Leave out one of the two.",
            )
        attempts = options.get("max_attempts", 3)
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
            raise DeclarationError(f"retry: max_attempts must be an integer from 1 on, not {attempts!r}.")
        base = _seconds(options, "backoff_seconds" if "backoff_seconds" in options else "base", cls.base)
        cap = _seconds(options, "cap", cls.cap)
        if "cap" in options and cap < base:
            raise DeclarationError(f"retry: the cap of {cap:g} s is below the first wait of {base:g} s.")
        return cls(attempts, backoff, base, _seconds(options, "backoff_factor", cls.factor, least=1.0), max(cap, base))

    def delay(self, attempt: int) -> float:
        """Return the seconds from the failure of an attempt (1 is the first) to the next one."""
        try:
            factor = {"fixed": 1.0, "linear": float(attempt)}.get(self.backoff) or self.factor ** (attempt - 1)
        except OverflowError:
            return self.cap
        return min(self.base * factor, self.cap)


def _seconds(options: Mapping[str, Any], key: str, default: float, *, least: float = 0.0) -> float:
    value = options.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise DeclarationError(f"retry: {key} must be a number from {least:g} on, not {value!r}.")
    return float(value)
