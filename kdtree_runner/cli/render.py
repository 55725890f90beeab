"""What the commands print: progress to standard error, results to standard output."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from kdtree_runner.spec_decode.checker import Comparison, Grade, Summary

if TYPE_CHECKING:
    from typing_extensions import Self

    from kdtree_runner.cli.report import Check, EngineRun

MAX_ROWS = 64  # of the table of prompts; past it only those that are not equal
STYLES: dict[Grade, str] = {"equal": "green", "tie": "yellow", "divergent": "bold red"}


class EngineProgress:
    """A bar an engine on a terminal, a line a phase elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TextColumn("{task.fields[phase]}", style="dim"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()

    def start(self, label: str, max_tokens: int) -> Callable[[dict[str, Any]], None]:
        """Begin a new engine; returns what its events are to be handed to."""
        task = self.progress.add_task(label, total=max_tokens, phase="starting")

        def on_event(event: dict[str, Any]) -> None:
            self._show(task, label, event)

        return on_event

    def _show(self, task: TaskID, label: str, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "progress":
            self.progress.update(task, completed=event["tokens"])
        elif kind == "result":
            records = event.get("records", ())
            tokens = event.get("num_tokens", sum(len(r["token_ids"]) for r in records))
            self.progress.update(task, completed=tokens, total=tokens, phase="done")
            self._line(f"{label}: {tokens} tokens in {event['seconds']:.1f} s")
        elif kind == "ready":
            self.progress.update(task, phase="generating")
            self._line(f"{label}: ready after {event['startup_seconds']:.0f} s, generating")
        elif kind == "phase":
            self.progress.update(task, phase=event["name"])
            self._line(f"{label}: {event['name']}")

    def _line(self, text: str) -> None:
        if not self.console.is_terminal:
            self.console.print(text, highlight=False)


def show_check(check: Check, console: Console | None = None) -> None:
    """Print the tables and the verdict of `kdtree verify`."""
    console = console or Console()
    console.print(prompt_table(check))
    console.print(run_table(check.runs, check.comparisons))
    console.print(conditions(check), style="dim", highlight=False)
    for warning in check.warnings():
        console.print(f"warning: {warning}", style="yellow", highlight=False)
    if check.control is not None:
        console.print(noise_floor(check), highlight=False)
    for run in check.trees:
        console.print(verdict(run.mode.label, check.comparisons[run.mode.label]), highlight=False)


def prompt_table(check: Check) -> Table:
    """One row a prompt: how each engine was graded on it, and the tokens a step there."""
    from kdtree_runner.cli.report import tokens_per_step

    others = [run for run in check.runs if run is not check.baseline]
    graded = [check.comparisons[run.mode.label].comparisons for run in others]
    indices = list(range(len(check.baseline.records)))
    if len(indices) > MAX_ROWS:
        indices = [i for i in indices if any(g[i].grade != "equal" for g in graded)]
    table = new_table("Prompts: grade and tok/step")
    for name in ("", "prompt", "tokens"):
        table.add_column(name, justify="right")
    for run in others:
        table.add_column(run.mode.label)
    for i in indices:
        base = check.baseline.records[i]
        cells = [str(i), str(len(base["prompt_token_ids"])), str(len(base["token_ids"]))]
        for run, grades in zip(others, graded, strict=True):
            pace = f" {tokens_per_step([run.records[i]]):.2f}" if run.mode.kind != "plain" else ""
            cells.append(grade_cell(grades[i]) + pace)
        table.add_row(*cells)
    return table


def new_table(title: str) -> Table:
    """An empty table that leaves no width unused: six columns of grades fit into 80."""
    looks: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    return Table(title=title, title_justify="left", **looks)


def grade_cell(comparison: Comparison) -> str:
    """A grade with the place and gap of the first difference."""
    text: str = comparison.grade
    if comparison.grade != "equal":
        text += f" at {comparison.num_equal}"
        text += f", gap {comparison.gap:.3g}" if comparison.gap is not None else ""
    style = STYLES[comparison.grade]
    return f"[{style}]{text}[/]"


def run_table(runs: list[EngineRun], comparisons: dict[str, Summary]) -> Table:
    """One row an engine: what it emitted, how fast, and whether it was the baseline's output."""
    table = new_table("Engines")
    table.add_column("mode")
    for name in ("tok/step", "accepted", "steps", "steps/s", "tokens", "tok/s", "equal"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        stats, drafted = run.result["acceptance"], run.num_drafts > 0
        steps = run.result["num_engine_steps"]
        summary = comparisons.get(run.mode.label)
        equal = f"{summary.count('equal')} of {len(summary.comparisons)}" if summary else ""
        table.add_row(
            run.mode.label,
            f"{run.tokens_per_step:.2f}",
            f"{stats['mean_accepted']:.2f} of {stats['mean_nodes']:.0f}" if drafted else "",
            str(steps),
            f"{run.per_second(steps):.1f}",
            str(run.num_tokens),
            f"{run.per_second(run.num_tokens):.1f}",
            equal,
        )
    return table


def conditions(check: Check) -> str:
    """Under which the numbers hold."""
    result, settings, sampling = check.baseline.result, check.settings, check.sampling
    ranks = settings.tensor_parallel_size
    sampled = f"temperature {sampling.temperature:g}, seeded" if sampling.temperature else "greedy"
    parts = [
        " + ".join(sorted(set(result["devices"]))) + (f", {ranks} ranks" if ranks > 1 else ""),
        result["dtype"],
        sampled,
        f"batch {settings.batch_size}",
        f"at most {sampling.max_tokens} tokens a prompt",
        f"attention {', '.join(result['attention']) or 'unknown'}",
    ]
    text = "; ".join(parts)
    if check.baseline.records[0]["top_gap"] is not None:
        text += "\nThe baseline's time includes the log-probabilities that tell ties apart."
    return (
        text + "\ntok/step: tokens emitted a request and decode step; accepted: nodes of a draft."
    )


def noise_floor(check: Check) -> str:
    """What the control says: how far the baseline differs from itself."""
    summary = check.comparisons["control"]
    changed = len(summary.comparisons) - summary.count("equal")
    text = f"control: the baseline differs from itself on {changed} of {len(summary.comparisons)}"
    text += " prompts at another batch size"
    if changed:
        text += f", at gaps up to {summary.noise_floor:.3g} (epsilon is {summary.epsilon:g})"
    return text + "."


def verdict(label: str, summary: Summary) -> str:
    """One line: how many prompts were equal, tied, divergent."""
    counts = ", ".join(f"{summary.count(grade)} {grade}" for grade in STYLES)
    total = len(summary.comparisons)
    worst = [grade for grade in STYLES if summary.count(grade)][-1]
    text = f"{label}: {counts} of {total} prompts (epsilon {summary.epsilon:g})"
    return f"[{STYLES[worst]}]{text}[/]"
