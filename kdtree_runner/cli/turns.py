"""Several engines side by side that measure by turns, so that a machine's slow minutes hit all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from kdtree_runner.cli.engine import Mode
from kdtree_runner.cli.errors import CommandError
from kdtree_runner.cli.supervise import CHILD, BenchJob, EngineProcess, Event


def run_side_by_side(
    jobs: Sequence[BenchJob],
    logs: Path,
    listener: Callable[[Mode], Callable[[Event], None]],
    timeout: float,
    command: tuple[str, ...] = CHILD,
) -> Iterator[tuple[Mode, Event | CommandError]]:
    """All engines start at once; then each in turn makes one measurement, and rests meanwhile.

    jobs: with `turns`, of as many measurements each. listener: what an engine's events go to. Every
    other round runs backwards, so that no engine always follows the same one. Yields as
    bench_e2e.run_each does: mode, and result or why there is none.
    """
    outcomes: dict[Mode, Event | CommandError] = {}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(EngineProcess(job, logs, timeout, command)) for job in jobs
        ]
        on_event = {job.mode: listener(job.mode) for job in jobs}

        def listen(process: EngineProcess, until: str) -> None:
            """Until the event has come, or the engine has failed."""
            mode = process.job.mode
            if isinstance(outcomes.get(mode), CommandError):
                return
            if until == "measured":
                process.give_turn()
            try:
                outcomes[mode] = process.listen(on_event[mode], until)
            except CommandError as error:
                print(error, file=sys.stderr)
                outcomes[mode] = error
                process.close()  # one that hangs would disturb the others

        for process in processes:
            listen(process, "ready")
        for turn in range(max(job.num_turns for job in jobs)):
            for process in processes if turn % 2 == 0 else reversed(processes):
                listen(process, "measured")
        for process in processes:
            listen(process, "result")
    for job in jobs:
        yield job.mode, outcomes[job.mode]
