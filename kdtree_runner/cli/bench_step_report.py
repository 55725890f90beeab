"""The results of `kdtree bench step`: tables, picture, and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kdtree_runner.cli.engine import EngineSettings, Sampling
from kdtree_runner.cli.report import versions
from kdtree_runner.cli.svg import Drawing, draw_bars
from kdtree_runner.cli.trace import ENGINE_PARTS, PARTS

IDLE = "host (GPU idle)"
REST = "host, the rest"


@dataclass
class StepReport:
    """Profiles by mode. results: the result events of the engines."""

    settings: EngineSettings
    sampling: Sampling
    command: list[str]
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, dict[str, Any]] = field(
        default_factory=dict
    )  # what they had, and the problem

    def found(self, label: str, batch: int) -> Mapping[str, Any]:
        """One mode's measurement at a batch size."""
        batches: list[Mapping[str, Any]] = self.results[label]["batches"]
        return next(found for found in batches if found["batch"] == batch)

    def bar(self, label: str, batch: int) -> dict[str, float]:
        """Milliseconds of a step by part; with what is left to the host they make the whole step.

        With a GPU: its busy time by part, and its idle time in a step as it is without profiler.
        Without: the host's time in each part, and the rest, all of profiled steps.
        """
        found = self.found(label, batch)
        profile = found["profile"]
        on_gpu = bool(profile["device"])
        times = profile["device"] if on_gpu else profile["host"]
        step = found["step_us"] if on_gpu else profile["step"]
        bar = {part: times[part] / 1e3 for part in PARTS if part in times}
        bar[IDLE if on_gpu else REST] = max(step / 1e3 - sum(bar.values()), 0.0)
        return bar

    def host_ms(self, label: str, batch: int) -> float:
        """The host's own time in the runner's part of a profiled step, waiting taken out."""
        profile = self.found(label, batch)["profile"]
        times = [time for part, time in profile["host"].items() if part not in ENGINE_PARTS]
        return float(sum(times) - profile["waits"]) / 1e3

    def engine_ms(self, label: str, batch: int, part: str) -> float:
        """The host's time in a part of the engine around the runner, of a profiled step."""
        return float(self.found(label, batch)["profile"]["host"].get(part, 0.0)) / 1e3

    def table(self, batch: int) -> str:
        """In Markdown: a row a part, a column a mode."""
        bars = {label: self.bar(label, batch) for label in self.results}
        names = list(dict.fromkeys(part for bar in bars.values() for part in bar))
        order = [part for part in (*PARTS, IDLE, REST) if part in names]
        rows = [
            [part, *(f"{bar[part]:.3f}" if part in bar else "-" for bar in bars.values())]
            for part in order
        ]
        rows.append(["sum", *(f"{sum(bar.values()):.3f}" for bar in bars.values())])
        found = [self.found(label, batch) for label in self.results]
        rows.append(["step, no profiler", *(f"{f['step_us'] / 1e3:.3f}" for f in found)])
        rows.append(["step, profiled", *(f"{f['profile']['step'] / 1e3:.3f}" for f in found)])
        hosts = [self.host_ms(label, batch) for label in self.results]
        rows.append(["runner on the host", *(f"{host:.3f}" for host in hosts)])
        for part in ENGINE_PARTS:
            times = [self.engine_ms(label, batch, part) for label in self.results]
            if any(times):
                rows.append([f"{part} on the host", *(f"{time:.3f}" for time in times)])
        launches = [sum(f["profile"]["launches"].values()) for f in found]
        if any(launches):
            rows.append(["launches by the host", *(f"{number:.1f}" for number in launches)])
        per_step = [f["num_tokens"] / f["num_steps"] / batch for f in found]
        rows.append(["tokens a step", *(f"{tokens:.2f}" for tokens in per_step)])
        head = [f"batch {batch}, ms", *bars]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            f"| {row[0].ljust(widths[0])} | "
            + " | ".join(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))
            + " |"
            for row in (head, *rows)
        ]
        rule = "|" + "-" * (widths[0] + 2) + "|" + "|".join("-" * (w + 1) + ":" for w in widths[1:])
        return "\n".join([lines[0], rule + "|", *lines[1:]])

    def conditions(self) -> str:
        """Under which the numbers hold, a line each."""
        found = next(iter(self.results.values()), None)
        if found is None:
            return "nothing was profiled"
        settings = self.settings
        attention = "; ".join(
            f"{label}: {', '.join(result['attention'])}" for label, result in self.results.items()
        )
        steps = found["batches"][0]["num_steps"]
        packages = ", ".join(f"{name} {version}" for name, version in versions().items())
        return "\n".join(
            [
                f"command: {shlex.join(self.command)}",
                f"on: {' + '.join(sorted(set(found['devices'])))}, "
                f"ranks: {settings.tensor_parallel_size}, the first is profiled; {found['dtype']}",
                f"models: {settings.model}, {settings.drafter}; means of {steps} steps",
                f"attention: {attention}",
                f"versions: {packages}",
                f"parts: the GPU's busy time, {IDLE}: a step without profiler less that; "
                "with no GPU the host's time in profiled steps",
                "runner on the host: of a profiled step, calls that wait for the GPU taken out; "
                "schedule and outputs: the engine around it",
                "launches by the host: kernels, copies and graphs that it starts in a step",
            ]
        )

    def plot(self) -> Drawing:
        """A bar a mode and batch size."""
        batches = sorted(
            {f["batch"] for result in self.results.values() for f in result["batches"]}
        )
        bars = {
            (label if len(batches) == 1 else f"{label}, B={batch}"): self.bar(label, batch)
            for batch in batches
            for label in self.results
        }
        parts = [part for part in (*PARTS, IDLE, REST) if any(part in bar for bar in bars.values())]
        notes = self.conditions().splitlines()[1:4]
        return draw_bars("a decode step by its parts", "ms", parts, bars, notes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "command": self.command,
            "versions": versions(),
            "settings": {**asdict(self.settings), **asdict(self.sampling)},
            "modes": dict(self.results),
            "failed": dict(self.failed),
        }
