"""How often a failed run is tried again, and how long after each failure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from weft.errors import DeclarationError, did_you_mean, nearest

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
    def declare(cls, given: Mapping[str, Any] | Retry | None) -> Retry:
        """What a pipeline's `retry=` says, or `DeclarationError` for what cannot be.

        Either `{"max_attempts": 5, "backoff_seconds": 30, "backoff_factor": 2.0}`, or with `backoff` (fixed, linear or
        exponential) and `base` in the place of the last two. `cap` goes with both. Without `max_attempts` there are 3.
        """
        if given is None:
            return cls()
        if isinstance(given, Retry):
            return given
        if not isinstance(given, Mapping):
            raise DeclarationError(f"retry must be a dict, not {type(given).__name__}.", hint=f"Its keys: {_listed()}.")
        for key in given:
            if key not in _KEYS:
                hint = did_you_mean(str(key), _KEYS, f"Its keys: {_listed()}.")
                raise DeclarationError(f"retry has no key {key!r}.", hint=hint)
        if "base" in given and "backoff_seconds" in given:
            raise DeclarationError("retry has both base and backoff_seconds, which mean the same.", hint="Keep one.")
        backoff = given.get("backoff", "exponential")
        if backoff not in _BACKOFFS:
            close = nearest(str(backoff), _BACKOFFS)
            hint = f"Did you mean {close!r}? " if close else ""
            raise DeclarationError(
                f"retry has the backoff {backoff!r}.", hint=f"{hint}A backoff is {', '.join(_BACKOFFS)}."
            )
        if "backoff_factor" in given and backoff != "exponential":
            raise DeclarationError(
                f"retry has a backoff_factor, and a {backoff} backoff has none.",
                hint="Leave out one of the two.",
            )
        attempts = given.get("max_attempts", 3)
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
            raise DeclarationError(f"retry: max_attempts must be an integer from 1 on, not {attempts!r}.")
        base = _seconds(given, "backoff_seconds" if "backoff_seconds" in given else "base", cls.base)
        cap = _seconds(given, "cap", cls.cap)
        if "cap" in given and cap < base:
            raise DeclarationError(f"retry: the cap of {cap:g} s is below the first wait of {base:g} s.")
        return cls(attempts, backoff, base, _seconds(given, "backoff_factor", cls.factor, least=1.0), max(cap, base))

    def delay(self, attempt: int) -> float:
        """The seconds from the failure of an attempt (1 is the first) to the next one."""
        try:
            factor = {"fixed": 1.0, "linear": float(attempt)}.get(self.backoff) or self.factor ** (attempt - 1)
        except OverflowError:
            return self.cap
        return min(self.base * factor, self.cap)


def _seconds(given: Mapping[str, Any], key: str, default: float, *, least: float = 0.0) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise DeclarationError(f"retry: {key} must be a number from {least:g} on, not {value!r}.")
    return float(value)


def _listed() -> str:
    return ", ".join(_KEYS)
