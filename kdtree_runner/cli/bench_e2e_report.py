"""The results of `kdtree bench e2e`: paired ratios, their tables, their picture, and as JSON."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kdtree_runner.cli.engine import EngineSettings, Mode, Sampling
from kdtree_runner.cli.report import versions
from kdtree_runner.cli.svg import Drawing, Panel, Point, draw_panels


@dataclass(frozen=True)
class Cell:
    """One batch size in one repeat: all waves of it together.

    first: number of the first request's prompt; the others have the next ones. step_seconds,
    num_tokens: of the steps in which the whole batch decodes. wall_seconds: of everything, prompts
    and the last requests' ends included. token_ids: of each request. num_from_cache: waves whose
    prompts may have been in the prefix cache.
    """

    batch: int
    repeat: int
    first: int
    step_seconds: list[float]
    num_tokens: int
    wall_seconds: float
    first_token_seconds: list[float]
    token_ids: list[list[int]]
    acceptance: dict[str, Any]
    num_from_cache: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.step_seconds)

    @property
    def num_steps(self) -> int:
        return len(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Of a request."""
        return self.num_tokens / (self.num_steps * self.batch) if self.num_steps else 0.0

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / self.num_steps if self.num_steps else 0.0

    @property
    def first_token_ms(self) -> float:
        return 1e3 * statistics.median(self.first_token_seconds)

    @property
    def wall_tokens_per_second(self) -> float:
        return sum(map(len, self.token_ids)) / self.wall_seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_step": self.tokens_per_step,
            "step_ms": self.step_ms,
            "first_token_ms": self.first_token_ms,
            "wall_tokens_per_second": self.wall_tokens_per_second,
        }


@dataclass(frozen=True)
class Ratio:
    """The geometric mean of paired ratios, its standard error, and their range.

    error: None of a single pair.
    """

    mean: float
    error: float | None
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Ratio | None:
        """None where there is no value."""
        found = list(values)
        if not found:
            return None
        logs = [math.log(value) for value in found]
        mean, error = math.exp(statistics.fmean(logs)), None
        if len(found) > 1:
            error = mean * statistics.stdev(logs) / math.sqrt(len(found))
        return cls(mean, error, min(found), max(found))

    def __str__(self) -> str:
        error = "" if self.error is None else f" ±{self.error:.2f}"
        return f"{self.mean:.2f}{error} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class ModeRun:
    """One engine: its cells, or why there are none."""

    mode: Mode
    cells: list[Cell] = field(default_factory=list)
    result: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None

    @classmethod
    def from_result(cls, mode: Mode, result: Mapping[str, Any]) -> ModeRun:
        """From the result event of its process."""
        cells = [Cell(**cell) for cell in result["cells"]]
        kept = {k: v for k, v in result.items() if k not in ("cells", "event")}
        return cls(mode, cells, kept)

    def at(self, batch: int) -> list[Cell]:
        """The repeats of a batch size, in order."""
        return [cell for cell in self.cells if cell.batch == batch]

    def ratio(self, other: ModeRun | None, batch: int) -> Ratio | None:
        """Tokens a second as a multiple of the other's on the same prompts, repeat by repeat."""
        if other is None:
            return None
        pairs = zip(self.at(batch), other.at(batch), strict=False)
        return Ratio.of(
            a.tokens_per_second / b.tokens_per_second
            for a, b in pairs
            if a.num_steps and b.num_steps
        )


def num_equal(cells: Sequence[Cell], others: Sequence[Cell]) -> tuple[int, int]:
    """Requests whose tokens are those that the others gave the same prompt, and all of these."""
    known = {cell.first + i: ids for cell in others for i, ids in enumerate(cell.token_ids)}
    pairs = [
        (ids, known[cell.first + i])
        for cell in cells
        for i, ids in enumerate(cell.token_ids)
        if cell.first + i in known
    ]
    return sum(a == b for a, b in pairs), len(pairs)


HEADS = ("batch", "mode", "tok/s", "tok/step", "ms/step", "TTFT ms", "x plain", "x chain", "equal")


@dataclass
class Comparison:
    """Everything that one `kdtree bench e2e` measured.

    requests: in a repeat, each on the repeat's own prompts; of larger batches as many as they hold.
    side_by_side: the engines took turns, so that ratios are of the same minutes.
    """

    settings: EngineSettings
    sampling: Sampling
    requests: int
    repeats: int
    command: list[str]
    side_by_side: bool = False
    by_mode: dict[Mode, ModeRun] = field(default_factory=dict)

    @property
    def runs(self) -> list[ModeRun]:
        return list(self.by_mode.values())

    def finish(self, mode: Mode, result: Mapping[str, Any]) -> None:
        """An engine's whole run, in the place of what was known of it."""
        self.by_mode[mode] = ModeRun.from_result(mode, result)

    def begin(self, mode: Mode, about: Mapping[str, Any]) -> None:
        """What an engine that goes on says of itself."""
        self.by_mode[mode] = ModeRun(mode, result=about)

    def add(self, mode: Mode, cell: Mapping[str, Any]) -> None:
        """One measurement of an engine that goes on."""
        known = self.by_mode.get(mode, ModeRun(mode))
        self.by_mode[mode] = replace(known, cells=[*known.cells, Cell(**cell)])

    def fail(self, mode: Mode, problem: Exception) -> None:
        """An engine that ended early; what it had measured stays."""
        known = self.by_mode.get(mode, ModeRun(mode))
        self.by_mode[mode] = replace(known, problem=str(problem).splitlines()[0])

    def empty(self) -> list[str]:
        """Measurements without a step that decodes the whole batch."""
        return [
            f"{run.mode.label} at batch {cell.batch}"
            for run in self.runs
            for cell in run.cells
            if not cell.num_steps
        ]

    def _first(self, kind: str) -> ModeRun | None:
        return next((r for r in self.runs if r.mode.kind == kind and not r.problem), None)

    @property
    def batches(self) -> list[int]:
        return sorted({cell.batch for run in self.runs for cell in run.cells})

    def idle(self) -> list[str]:
        """Speculative engines that never drafted: their speed says nothing."""
        return [
            run.mode.label
            for run in self.runs
            if run.cells
            and run.mode.kind != "plain"
            and not any(cell.acceptance["num_drafts"] for cell in run.cells)
        ]

    def equal(self, run: ModeRun, batch: int) -> tuple[int, int] | None:
        """Against plain decoding one at a time; for that itself there is nothing to compare."""
        plain = self._first("plain")
        if plain is None or not plain.cells:
            return None
        least = plain.cells[0].batch
        if run is plain and batch == least:
            return None
        return num_equal(run.at(batch), plain.at(least))

    def rows(self) -> list[list[str]]:
        """Cells of the table, without its head."""
        plain, chain = self._first("plain"), self._first("chain")
        rows = []
        for batch in self.batches:
            for run in self.runs:
                cells = run.at(batch)
                if not cells:
                    continue
                equal = self.equal(run, batch)
                rows.append(
                    [
                        str(batch),
                        run.mode.label,
                        f"{_median(c.tokens_per_second for c in cells):.0f}",
                        f"{_median(c.tokens_per_step for c in cells):.2f}",
                        f"{_median(c.step_ms for c in cells):.2f}",
                        f"{_median(c.first_token_ms for c in cells):.1f}",
                        _shown(run.ratio(plain if run is not plain else None, batch)),
                        _shown(run.ratio(chain if run is not chain else None, batch)),
                        f"{equal[0]} of {equal[1]}" if equal else "-",
                    ]
                )
        return rows

    def table(self) -> str:
        """In Markdown."""
        rows = self.rows()
        widths = [max(map(len, column)) for column in zip(HEADS, *rows, strict=True)]
        lines = [
            "| " + " | ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) + " |"
            for row in (HEADS, *rows)
        ]
        rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
        return "\n".join([lines[0], rule, *lines[1:]])

    def conditions(self) -> str:
        """Under which the numbers hold, a line each."""
        found = next((run.result for run in self.runs if run.result), None)
        if found is None:
            return "nothing was measured"
        sampling, settings = self.sampling, self.settings
        how = f"temperature {sampling.temperature:g}, seeded" if sampling.temperature else "greedy"
        ranks = settings.tensor_parallel_size
        backends = "; ".join(
            f"{run.mode.label}: {', '.join(run.result.get('attention', ())) or 'unknown'}"
            for run in self.runs
            if run.result
        )
        least = self.batches[0] if self.batches else 1
        packages = ", ".join(f"{name} {version}" for name, version in versions().items())
        cached = sum(cell.num_from_cache for run in self.runs for cell in run.cells)
        warning = [f"WARNING: the prefix cache was not emptied before {cached} waves"]
        return "\n".join(
            [
                f"command: {shlex.join(self.command)}",
                f"on: {' + '.join(sorted(set(found['devices'])))}, ranks: {ranks}; "
                f"{found['dtype']}",
                f"models: {settings.model}, {settings.drafter}",
                f"requests: {self.requests} x {sampling.max_tokens} tokens a repeat, "
                f"in whole batches, {how}; "
                f"{self.repeats} repeats, each on the next prompts; medians, with ranges; engines "
                + ("side by side, by turns" if self.side_by_side else "one after another"),
                f"attention: {backends}",
                f"versions: {packages}",
                "tok/s, tok/step (a request) and ms/step: of the steps in which every request of "
                "the batch decodes",
                "x plain, x chain: geometric mean of the repeats' ratios ±standard error (range)",
                f"equal: requests whose tokens are those of plain decoding at batch {least}, of "
                "those whose prompt it had there",
                *(warning if cached else []),
            ]
        )

    def plot(self) -> Drawing:
        """Tokens a second, and the ratio to the chain, or to plain where there is no chain."""
        base = self._first("chain") or self._first("plain")
        speeds, ratios = {}, {}
        for run in self.runs:
            if not run.cells:
                continue
            label = run.mode.label
            rates = ((b, [c.tokens_per_second for c in run.at(b)]) for b in self.batches)
            speeds[label] = [Point(b, _median(r), min(r), max(r)) for b, r in rates if r]
            found = ((b, run.ratio(base, b)) for b in self.batches)
            ratios[label] = [Point(b, r.mean, r.low, r.high) for b, r in found if r is not None]
        name = base.mode.label if base is not None else "nothing"
        panels = [
            Panel("tokens a second", "requests decoded together", speeds),
            Panel(f"speed as a multiple of {name}", "requests decoded together", ratios, level=1),
        ]
        return draw_panels(panels, self.conditions().splitlines()[1:5])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "command": self.command,
            "versions": versions(),
            "settings": {**asdict(self.settings), **asdict(self.sampling)},
            "requests": self.requests,
            "repeats": self.repeats,
            "side_by_side": self.side_by_side,
            "modes": {run.mode.label: self._mode(run) for run in self.runs},
        }

    def _mode(self, run: ModeRun) -> dict[str, Any]:
        plain, chain = self._first("plain"), self._first("chain")
        ratios = {
            str(batch): {
                "plain": _as_dict(run.ratio(plain, batch)),
                "chain": _as_dict(run.ratio(chain, batch)),
                "equal": self.equal(run, batch),
            }
            for batch in self.batches
            if run.at(batch)
        }
        return {
            **asdict(run.mode),
            **run.result,
            "problem": run.problem,
            "ratios": ratios,
            "cells": [cell.to_dict() for cell in run.cells],
        }


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _shown(ratio: Ratio | None) -> str:
    return "-" if ratio is None else str(ratio)


def _as_dict(ratio: Ratio | None) -> dict[str, float | None] | None:
    return None if ratio is None else asdict(ratio)
