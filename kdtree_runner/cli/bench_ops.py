"""`kdtree bench ops`: the operators in CUDA graphs, beside peers and the least possible time."""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kdtree_runner.cli import bench_shapes
from kdtree_runner.cli.bench_shapes import Shape
from kdtree_runner.cli.errors import CommandError, ExitCode, wanted

if TYPE_CHECKING:
    import torch

    from kdtree_runner.cli.bench_calls import Inputs
    from kdtree_runner.cli.bench_peers import Peer
    from kdtree_runner.cli.bench_report import Outcome, Row

Progress = Callable[[str], None]


class ContextLost(Exception):
    """A kernel broke the GPU's context: nothing more can run in this process."""


def run(args: argparse.Namespace) -> ExitCode:
    """Measure the shapes, print each row as it comes, keep the report up to date."""
    check_machine()
    from kdtree_runner.cli import bench_peers, bench_report, bench_timing
    from kdtree_runner.cli.bench_calls import PAGE_SIZE

    todo = bench_shapes.shapes(args.ops, args.shapes == "all", args.dtype)
    progress = _progress()
    progress("looking for vLLM")
    try:
        vllm = bench_peers.import_vllm()
    except Exception as error:
        vllm = str(error)
    import torch

    card = bench_shapes.card_of(torch.cuda.get_device_name())
    found = bench_report.conditions(card, args.dtype, PAGE_SIZE, vllm)
    print("\n".join(f"{name}: {value}" for name, value in found.items()), flush=True)
    bench_timing.warm_up()
    rows: list[Row] = []
    started, lost = time.perf_counter(), None
    table: bench_report.Table | None = None
    for i, shape in enumerate(todo):
        progress(f"{i + 1}/{len(todo)} {shape.op} {shape.label}")
        try:
            row = measure(shape, args.peers, progress)
        except ContextLost as error:
            lost = str(error)
            break
        row = _with_floor(row, card)
        if table is None or rows[-1].shape.op != shape.op:
            table = bench_report.Table(shape.columns, bench_peers.names_of(shape, args.peers))
            print(f"\n{shape.op}\n\n{table.head()}")
        print(table.line(row), flush=True)
        rows.append(row)
        if args.json is not None:
            write_report(args.json, found, rows)
    print()
    for problem in bench_report.problems(rows):
        print(f"- {problem}")
    print(f"\n{len(rows)} of {len(todo)} shapes in {time.perf_counter() - started:.0f} s")
    if lost is not None:
        left = "; ".join(f"{shape.op} {shape.label}" for shape in todo[len(rows) :])
        raise CommandError(f"{lost}; not measured: {left}; --peers leaves a peer out")
    return ExitCode.ENGINE_FAILURE if any(row.ours.problem for row in rows) else ExitCode.OK


def check_machine() -> None:
    """Refuse where there is no GPU that the library is built for."""
    import torch

    from kdtree_runner import native
    from kdtree_runner.cli.devices import gpus
    from kdtree_runner.cli.features import gpu_problems

    found = gpus()
    if not found:
        raise wanted("device", "a CUDA GPU", f"none, with torch {torch.__version__}")
    try:
        problems = gpu_problems(found[:1], native.build_info())
    except ImportError as error:
        raise CommandError(f"native library: {error}") from error
    if problems:
        raise CommandError(problems[0])


def current_device() -> torch.device:
    """The GPU that is measured."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def measure(shape: Shape, peers: Sequence[str], progress: Progress) -> Row:
    """Time one shape. peers: groups of those that are asked for."""
    from kdtree_runner.cli import bench_calls, bench_peers, bench_report, bench_timing

    device = current_device()
    asked = [peer for peer in bench_peers.peers_of(shape) if peer.group in peers]
    inputs: Inputs | None = None

    def ours() -> bench_report.Outcome:
        nonlocal inputs
        inputs = bench_calls.make_inputs(shape, device)
        return bench_report.Outcome(bench_timing.in_graph(inputs.run))

    def theirs(peer: Peer) -> bench_report.Outcome:
        assert inputs is not None
        call = bench_peers.make_peer(peer, inputs)
        time_it = bench_timing.in_graph if peer.in_graph else bench_timing.on_host
        return bench_report.Outcome(time_it(call))

    own = attempt("ours", ours)
    outcomes: dict[str, Outcome] = {}
    for peer in asked:
        progress(f"  {peer.name}")
        if inputs is None:
            outcomes[peer.name] = bench_report.Outcome(problem="failed: its inputs were not made")
        else:
            outcomes[peer.name] = attempt(peer.name, lambda peer=peer: theirs(peer))  # type: ignore[misc]
        _free()
    inputs = None
    _free()
    return bench_report.Row(shape, own, None, outcomes)


def attempt(name: str, work: Callable[[], Outcome]) -> Outcome:
    """What the work gives, or why it gives nothing."""
    import torch

    from kdtree_runner.cli.bench_peers import Missing
    from kdtree_runner.cli.bench_report import Outcome

    try:
        return work()
    except Missing as error:
        return Outcome(problem=f"missing: {error}")
    except Exception as error:  # whatever it is, the table says it
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    gc.collect()  # what the traceback held
    try:
        torch.cuda.synchronize()
    except Exception as error:
        raise ContextLost(f"{name} broke the GPU's context: {reason}") from error
    return Outcome(problem=f"failed: {reason}")


def write_report(path: Path, found: dict[str, str], rows: Sequence[Row]) -> None:
    """All that is known so far."""
    report = {"conditions": found, "rows": [row.to_dict() for row in rows]}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _with_floor(row: Row, card: bench_shapes.Card | None) -> Row:
    return row if card is None else replace(row, floor=row.shape.least(card))


def _free() -> None:
    """Give memory back before the next one needs it."""
    import torch

    torch.cuda.empty_cache()


def _progress() -> Progress:
    """What is under way, to standard error."""
    from rich.console import Console

    console = Console(stderr=True)
    started = time.perf_counter()

    def show(text: str) -> None:
        seconds = time.perf_counter() - started
        console.print(f"{seconds:6.1f} s  {text}", highlight=False, soft_wrap=True)

    return show
