"""`kdtree bench e2e`: plain, chain and DDTree on the same prompts, at every batch size."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kdtree_runner.cli.demo import default_model
from kdtree_runner.cli.engine import ADAPT, EngineSettings, Mode
from kdtree_runner.cli.errors import CommandError, EngineError, ExitCode, UserError, wanted
from kdtree_runner.cli.options import BUDGETS
from kdtree_runner.cli.prompts import Prompt
from kdtree_runner.cli.svg import Drawing
from kdtree_runner.cli.values import PART
from kdtree_runner.cli.verify import (
    choose_prompts,
    engine_settings,
    log_directory,
    sampling_settings,
)
from kdtree_runner.platform import is_cpu_build

if TYPE_CHECKING:
    from kdtree_runner.cli.render import EngineProgress
    from kdtree_runner.cli.supervise import BenchJob

SHARED_MEMORY = 0.9  # of a GPU, for all engines that live side by side


def run(args: argparse.Namespace) -> ExitCode:
    """One engine a mode, each with all batch sizes; then a table, and a picture if asked for."""
    from kdtree_runner.cli.bench_e2e_report import Comparison
    from kdtree_runner.cli.render import EngineProgress
    from kdtree_runner.cli.supervise import BenchJob

    settings, sampling = bench_settings(args), sampling_settings(args)
    batches = tuple(sorted(set(args.batches)))
    requests = args.num_prompts
    prompts = bench_prompts(
        args.prompts, requests * (args.repeats - 1) + max(requests, batches[-1])
    )
    command = ["kdtree", *sys.argv[1:]]
    report = Comparison(settings, sampling, requests, args.repeats, command, args.side_by_side)
    total = sum(-(-requests // b) * b for b in batches) * args.repeats * sampling.max_tokens
    started = time.perf_counter()
    problems: dict[str, CommandError] = {}
    with log_directory() as logs, EngineProgress() as progress:
        jobs = [
            BenchJob(
                mode,
                settings,
                sampling,
                prompts,
                task="waves",
                batches=batches,
                repeats=args.repeats,
                requests=requests,
                turns=args.side_by_side,
            )
            for mode in choose_modes(args)
        ]

        def keep(mode: Mode, cell: dict[str, Any]) -> None:
            report.add(mode, cell)
            save_json(args.json, report)  # nothing is lost if this command is ended

        for mode, outcome in run_each(args, jobs, logs, progress, total, report.begin, keep):
            if isinstance(outcome, CommandError):
                report.fail(mode, outcome)
                problems[mode.label] = outcome
            else:
                report.finish(mode, outcome)
            save_json(args.json, report)
        print(report.table())
        print(f"\n{report.conditions()}\nall engines: {time.perf_counter() - started:.0f} s")
        save_plot(args.plot, report)
        raise_problems(problems, logs)
        if report.idle():
            raise EngineError(f"no measurement of {', '.join(report.idle())}; logs in {logs}")
        if report.empty():
            what = f"more, so that a step decodes the whole batch ({', '.join(report.empty())})"
            raise wanted("--max-tokens", what, args.max_tokens)
    return ExitCode.OK


def choose_modes(args: argparse.Namespace) -> list[Mode]:
    """The engines in running order: what the others are compared with comes first."""
    modes = []
    if "plain" in args.modes:
        modes.append(Mode("plain", backend=args.plain_backend))
    if "chain" in args.modes:
        modes.append(Mode("chain", backend=args.chain_backend))
    budgets = list(dict.fromkeys(args.tree_budget or BUDGETS))
    if "tree" in args.modes:
        modes += [Mode("tree", budget, adapt=False) for budget in budgets]
    if "adaptive" in args.modes:
        modes.append(Mode("tree", max(budgets), adapt=True))
    return modes


def run_each(
    args: argparse.Namespace,
    jobs: Sequence[BenchJob],
    logs: Path,
    progress: EngineProgress,
    total: int,
    begin: Callable[[Mode, dict[str, Any]], None],
    keep: Callable[[Mode, dict[str, Any]], None],
) -> Iterator[tuple[Mode, dict[str, Any] | CommandError]]:
    """The jobs one after another, or side by side: mode, and result or why there is none.

    begin: gets what an engine says of itself when it is ready. keep: gets every measurement as soon
    as it is made. An engine that fails is told of at once; the others are worth having.
    """
    from kdtree_runner.cli.supervise import run_job
    from kdtree_runner.cli.turns import run_side_by_side

    def listener(mode: Mode) -> Callable[[dict[str, Any]], None]:
        show = progress.start(mode.label, total)

        def on_event(event: dict[str, Any]) -> None:
            show(event)
            if event["event"] == "ready":
                begin(mode, {k: v for k, v in event.items() if k != "event"})
            elif event["event"] == "measured":
                keep(mode, event["measurement"])

        return on_event

    if args.side_by_side:
        yield from run_side_by_side(jobs, logs, listener, args.timeout)
        return
    for job in jobs:
        try:
            yield job.mode, run_job(job, logs, listener(job.mode), args.timeout)
        except CommandError as error:
            print(error, file=sys.stderr)
            yield job.mode, error


def raise_problems(problems: Mapping[str, CommandError], logs: Path) -> None:
    """End the command by what ended its engines: a user's mistake, or a failure."""
    if not problems:
        return
    message = f"no whole measurement of {', '.join(problems)}; logs in {logs}"
    refused = [error for error in problems.values() if isinstance(error, UserError)]
    raise UserError(f"{refused[0]}\n{message}") if refused else EngineError(message)


def bench_settings(args: argparse.Namespace) -> EngineSettings:
    """What the flags say of the engines; the miniature pair unless they name another."""
    args.model = args.model or default_model("--model", "target")
    args.drafter = args.drafter or default_model("--drafter", "drafter")
    args.batch_size = max(args.batches)
    if ADAPT in args.tree_args:
        raise wanted(
            "--tree-args", f"--modes tree or adaptive in the place of {ADAPT}", args.tree_args
        )
    if args.side_by_side and not is_cpu_build():
        if args.kv_cache_gib is None:
            raise wanted(
                "--side-by-side", "--kv-cache-gib too, so that no engine takes all memory", "none"
            )
        if args.gpu_memory_utilization is None:
            args.gpu_memory_utilization = SHARED_MEMORY / len(choose_modes(args))
    return engine_settings(args)


def bench_prompts(path: Path | None, wanted: int) -> list[Prompt]:
    """As many prompts as there are, `wanted` at most: past the last the first comes again."""
    if path is None:
        from kdtree_runner.cli.prompts import HELDOUT

        lines = HELDOUT.read_text(encoding="utf-8").count("\n") if HELDOUT.is_file() else wanted
        return choose_prompts(None, min(wanted, lines))
    return choose_prompts(path, None)[:wanted]


class Report(Protocol):
    """What a benchmark of engines found."""

    def plot(self) -> Drawing: ...
    def to_dict(self) -> dict[str, Any]: ...


def save_json(path: Path | None, report: Report) -> None:
    """Write the report, if it is asked for."""
    if path is not None:
        whole = path.with_name(path.name + PART)
        whole.write_text(json.dumps(report.to_dict()) + "\n", encoding="utf-8")
        os.replace(whole, path)  # never half a file


def save_plot(path: Path | None, report: Report) -> None:
    """Write the picture, if one is asked for."""
    if path is not None:
        report.plot().save(path)
