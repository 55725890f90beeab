"""`kdtree bench step`: where the time of a decode step goes, for plain, chain and trees."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from kdtree_runner.cli.bench_e2e import (
    bench_prompts,
    bench_settings,
    choose_modes,
    raise_problems,
    run_each,
    save_json,
    save_plot,
)
from kdtree_runner.cli.errors import CommandError, ExitCode
from kdtree_runner.cli.verify import log_directory, sampling_settings

if TYPE_CHECKING:
    from kdtree_runner.cli.engine import Mode


def run(args: argparse.Namespace) -> ExitCode:
    """One engine a mode; a profile of every batch size in each."""
    from kdtree_runner.cli.bench_step_report import StepReport
    from kdtree_runner.cli.render import EngineProgress
    from kdtree_runner.cli.supervise import BenchJob

    args.max_tokens = 2  # the profile itself sets how long requests run
    settings, sampling = bench_settings(args), sampling_settings(args)
    batches = tuple(sorted(set(args.batches)))
    prompts = bench_prompts(args.prompts, batches[-1])
    report = StepReport(settings, sampling, ["kdtree", *sys.argv[1:]])
    problems: dict[str, CommandError] = {}
    with log_directory() as logs, EngineProgress() as progress:
        jobs = [
            BenchJob(
                mode,
                settings,
                sampling,
                prompts,
                task="profile",
                batches=batches,
                num_steps=args.num_steps,
                turns=args.side_by_side,
            )
            for mode in choose_modes(args)
        ]

        def begin(mode: Mode, about: dict[str, Any]) -> None:
            report.results[mode.label] = {"batches": [], **about}

        def keep(mode: Mode, found: dict[str, Any]) -> None:
            report.results[mode.label]["batches"].append(found)
            save_json(args.json, report)  # nothing is lost if this command is ended

        for mode, outcome in run_each(args, jobs, logs, progress, 0, begin, keep):
            if isinstance(outcome, CommandError):
                problems[mode.label] = outcome
                report.failed[mode.label] = report.results.pop(mode.label, {"batches": []})
                report.failed[mode.label]["problem"] = str(outcome).splitlines()[0]
            else:
                report.results[mode.label] = outcome
            save_json(args.json, report)
        for batch in batches:
            print(f"\n{report.table(batch)}")
        print(f"\n{report.conditions()}")
        save_plot(args.plot, report)
        raise_problems(problems, logs)
    return ExitCode.OK
