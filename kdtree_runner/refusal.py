"""How everything that DDTree does not serve is refused: by name, at start-up."""

from __future__ import annotations

from typing import NoReturn


class UnsupportedError(ValueError):
    """A setting or model that DDTree does not serve: names the key, what was wanted, what came."""


def refuse(key: str, wanted: str, got: object) -> NoReturn:
    """Refuse one setting."""
    raise UnsupportedError(f"{key}: wanted {wanted}, got {got!r}")


def integer(key: str, value: object, low: int, high: int) -> int:
    """The value, if it is an integer in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        refuse(key, f"an integer in [{low}, {high}]", value)
    return value
