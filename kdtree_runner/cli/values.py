"""Parsers of flags' values. A value that argparse takes is a value that the command can use."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdtree_runner.config import MAX_NODES


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A parser of integers in [low, high]."""
    span = f"in [{low}, {high}]" if high is not None else f"of at least {low}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"wanted an integer {span}, got {text!r}")
        return value

    return parse


def number(low: float, high: float = math.inf, above: bool = False) -> Callable[[str], float]:
    """A parser of finite numbers in [low, high], or in (low, high] if `above`."""
    span = f"{'above' if above else 'of at least'} {low:g}"
    span += f" and at most {high:g}" if math.isfinite(high) else ""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or not math.isfinite(value) or (above and value == low):
            raise argparse.ArgumentTypeError(f"wanted a number {span}, got {text!r}")
        return value

    return parse


def budgets(text: str) -> list[int]:
    """A comma list of tree budgets."""
    return [integer(1, MAX_NODES)(part.strip()) for part in text.split(",")]


def sizes(text: str) -> list[int]:
    """A comma list of batch sizes."""
    return [integer(1)(part.strip()) for part in text.split(",")]


def mapping(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"wanted a JSON object, got {text!r}")
    return value


def backend(text: str) -> str | None:
    """The name of an attention backend, or auto."""
    return None if text == "auto" else text


def some_of(names: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """A parser of comma lists of these names; they come in our order."""

    def parse(text: str) -> tuple[str, ...]:
        chosen = [part.strip() for part in text.split(",")]
        for name in chosen:
            if name not in names:
                raise argparse.ArgumentTypeError(f"wanted some of {','.join(names)}, got {name!r}")
        return tuple(name for name in names if name in chosen)

    return parse


def out_file(text: str) -> Path:
    """A file that can be made."""
    path = Path(text)
    try:
        if path.is_dir():
            raise IsADirectoryError
        with tempfile.TemporaryFile(dir=path.absolute().parent):  # before hours of work
            return path
    except OSError:
        wanted = "a file in an existing directory that can be written to"
        raise argparse.ArgumentTypeError(f"wanted {wanted}, got {text!r}") from None
