"""The results of `kdtree bench ops`: rows as they come, their table in Markdown, and as JSON."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kdtree_runner.cli.bench_shapes import Card, Shape
from kdtree_runner.cli.bench_timing import CALLS, REPLAYS, Timing


@dataclass(frozen=True)
class Outcome:
    """A time, or why there is none: "missing: ..." or "failed: ..."."""

    timing: Timing | None = None
    problem: str | None = None

    def cell(self, ours: float | None = None) -> str:
        """The time; beside it, how many times as long as ours it is."""
        if self.timing is None:
            return str(self.problem).split(":")[0]
        us = self.timing.median
        return f"{us:.1f}" + (f" ({us / ours:.2f})" if ours else "")

    def to_dict(self) -> dict[str, Any]:
        if self.timing is None:
            return {"problem": self.problem}
        timing = self.timing
        return {
            "us": timing.median,
            "spread": timing.spread,
            "in_graph": timing.in_graph,
            "samples": timing.samples,
        }


@dataclass(frozen=True)
class Row:
    """One shape: our time, the least possible one in microseconds, and everyone else's."""

    shape: Shape
    ours: Outcome
    floor: float | None
    peers: dict[str, Outcome] = field(default_factory=dict)

    @property
    def best_peer(self) -> float | None:
        times = [peer.timing.median for peer in self.peers.values() if peer.timing is not None]
        return min(times, default=None)

    def cells(self, peers: Sequence[str]) -> list[str]:
        """Of a table with these peers; "-" for one that has nothing to do with this shape."""
        timing = self.ours.timing
        ours = timing.median if timing is not None else None
        return [
            self.shape.label,
            self.ours.cell(),
            f"{timing.spread:.0%}" if timing is not None else "-",
            f"{self.floor:.2f}" if self.floor is not None else "-",
            # A floor of less than a tenth of a microsecond is nobody's bound.
            _ratio(ours, self.floor if self.floor and self.floor >= 0.1 else None),
            *(self.peers[name].cell(ours) if name in self.peers else "-" for name in peers),
            _ratio(self.best_peer, ours),
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.shape.op,
            "shape": asdict(self.shape),
            "floor_us": self.floor,
            "ours": self.ours.to_dict(),
            "peers": {name: peer.to_dict() for name, peer in self.peers.items()},
        }


class Table:
    """Rows of one operator, to be printed as they come."""

    def __init__(self, columns: str, peers: Sequence[str]) -> None:
        self.peers = list(peers)
        names = ["us", "spread", "floor", "x floor", *peers, "best peer / ours"]
        self.names = [columns, *names]
        self.widths = [max(len(columns), 38), *(max(len(name), 7) for name in names)]
        for i in range(5, len(names)):  # peers
            self.widths[i] = max(self.widths[i], len("36605.8 (5.00)"))

    def head(self) -> str:
        rule = "|".join("-" * (width + 1) + ":" for width in self.widths)
        return f"{self._line(self.names)}\n|{rule}|"

    def line(self, row: Row) -> str:
        return self._line(row.cells(self.peers))

    def _line(self, cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, self.widths, strict=True)]
        return f"| {' | '.join(padded)} |"


def _ratio(of: float | None, to: float | None) -> str:
    return f"{of / to:.2f}" if of is not None and to else "-"


def problems(rows: Sequence[Row]) -> list[str]:
    """A line for every reason why a time is missing, with the shapes it holds for."""
    shapes: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for name, outcome in {"ours": row.ours, **row.peers}.items():
            if outcome.problem is not None:
                key = (row.shape.op, name, outcome.problem)
                shapes.setdefault(key, []).append(row.shape.label)
    every: dict[tuple[str, str], int] = {}
    for row in rows:
        for name in ("ours", *row.peers):
            every[row.shape.op, name] = every.get((row.shape.op, name), 0) + 1
    lines = []
    for (op, name, problem), labels in shapes.items():
        where = "all shapes" if len(labels) == every[op, name] else "; ".join(labels)
        lines.append(f"{op}, {name}: {problem} [{where}]")
    return lines


def conditions(card: Card | None, dtype: str, page_size: int, vllm: str) -> dict[str, str]:
    """Under which the times hold. vllm: its version, or why there is none."""
    import torch

    from kdtree_runner import __version__, native

    floor = "unknown card"
    if card is not None:
        floor = f"bytes at {card.bandwidth / 1e6:g} TB/s or FLOP at {card.tensor / 1e6:g} TFLOP/s"
        floor += f" ({card.name})"
    return {
        "command": " ".join(["kdtree", *sys.argv[1:]]),
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "vllm": vllm,
        "kdtree_runner": f"{__version__}, {native.build_info()}",
        "cache": f"{dtype}, pages of {page_size}",
        "times": (
            f"microseconds a call: median of {REPLAYS[0]} to {REPLAYS[1]} replays of a CUDA graph "
            f"of {CALLS} calls; CPU heap and walk: of as many calls, by the host's clock"
        ),
        "spread": "range of the middle half of the replays, as a share of the median",
        "floor": floor,
    }


def _driver() -> str:
    """The driver's version and the card's power limit, as nvidia-smi says them."""
    query = ("--query-gpu=driver_version,power.limit", "--format=csv,noheader")
    try:
        found = subprocess.run(
            ("nvidia-smi", *query), capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return found.stdout.splitlines()[0] if found.stdout else "unknown"
