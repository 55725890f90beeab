"""Parsers of flags' values. A value that argparse takes is a value that the command can use."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdtree_runner.config import MAX_NODES

MOST = 10**9  # of flags that have no other bound: what follows computes in 32 bits here and there
PART = ".new"  # ends the name of a file that is being written


def integer(low: int, high: int = MOST) -> Callable[[str], int]:
    """A parser of integers in [low, high]."""
    span = f"in [{low}, {high}]"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"wanted an integer {span}, got {text!r}")
        return value

    return parse


def number(low: float, high: float = MOST, above: bool = False) -> Callable[[str], float]:
    """A parser of numbers in [low, high], or in (low, high] if `above`."""
    span = f"{'above' if above else 'of at least'} {low:g} and at most {high:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or (above and value == low):
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
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"wanted a JSON object, got {text!r}")
    return value


# Keys of a speculative config that have a flag, which other engines read as well.
FLAGS = {
    "method": "no method",
    "model": "--drafter",
    "num_speculative_tokens": "--horizon",
    "tree_budget": "--tree-budget",
}


def tree_arguments(text: str) -> dict[str, Any]:
    """A JSON object of a tree's further settings."""
    value = mapping(text)
    for key in value:
        flag = FLAGS.get(key.replace("-", "_"))
        if flag is not None:
            raise argparse.ArgumentTypeError(f"wanted {flag} in the place of {key!r}, got {text!r}")
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
    """A regular file that can be written, or made, and made beside under a name with PART."""
    path = Path(text)
    if path.is_symlink():
        path = path.resolve()  # a benchmark puts a whole new file in its place
    try:
        if path.exists():
            if not path.is_file():
                raise OSError
            path.open("ab").close()
        trial = path.with_name(path.name + PART)  # before hours of work
        trial.touch()
        trial.unlink()
        return path
    except (OSError, ValueError):
        wanted = "a regular file in an existing directory that can be written to"
        raise argparse.ArgumentTypeError(f"wanted {wanted}, got {text!r}") from None
