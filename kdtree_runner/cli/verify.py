"""`kdtree verify`: is DDTree's output the baseline's, token for token?"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from kdtree_runner.cli.engine import EngineSettings, Mode, Sampling
from kdtree_runner.cli.errors import EngineError, ExitCode, wanted
from kdtree_runner.cli.options import DEFAULT_PROMPTS
from kdtree_runner.cli.prompts import Prompt, load_file, load_heldout
from kdtree_runner.config import DEFAULT_BUDGET

BASELINE = Mode("plain")
CONTROL = Mode("plain", is_control=True)
CHAIN = Mode("chain")


def run(args: argparse.Namespace) -> ExitCode:
    """Run every engine, compare, report."""
    from kdtree_runner.cli.render import EngineProgress, show_check
    from kdtree_runner.cli.report import Check, EngineRun, default_epsilon
    from kdtree_runner.cli.supervise import Job, run_job

    settings, sampling = engine_settings(args), sampling_settings(args)
    prompts = choose_prompts(args.prompts, args.num_prompts)
    modes = choose_modes(args)
    runs: dict[Mode, EngineRun] = {}
    with log_directory() as logs, EngineProgress() as progress:
        for mode in modes:
            job = Job(mode, settings, sampling, prompts)
            on_event = progress.start(mode.label, len(prompts) * sampling.max_tokens)
            runs[mode] = EngineRun(mode, run_job(job, logs, on_event, args.timeout))
    epsilon = args.epsilon
    if epsilon is None:
        epsilon = default_epsilon(runs[BASELINE].result["dtype"])
    check = Check(
        settings,
        sampling,
        args.strict,
        epsilon,
        runs[BASELINE],
        [engine for mode, engine in runs.items() if mode.kind == "tree"],
        runs.get(CHAIN),
        runs.get(CONTROL),
    )
    show_check(check)
    if args.json is not None:
        report = check.to_dict(["kdtree", *sys.argv[1:]])
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if check.idle():
        raise EngineError(f"nothing was checked: {', '.join(check.idle())} never drafted a token")
    return check.exit_code


def choose_modes(args: argparse.Namespace) -> list[Mode]:
    """The engines in running order: trees first, they refuse at start-up what does not fit."""
    budgets = list(dict.fromkeys(args.tree_budget or [DEFAULT_BUDGET]))
    modes = [Mode("tree", budget) for budget in budgets]
    if args.with_chain:
        modes.append(CHAIN)
    if args.control:
        modes.append(CONTROL)
    return [*modes, BASELINE]


def choose_prompts(path: Path | None, num_prompts: int | None) -> list[Prompt]:
    """A file's prompts, or the first of the shipped ones."""
    if path is not None:
        return load_file(path, num_prompts)
    return load_heldout(DEFAULT_PROMPTS if num_prompts is None else num_prompts)


def engine_settings(args: argparse.Namespace) -> EngineSettings:
    """What the flags say of the engines."""
    check_model("--model", args.model)
    check_model("--drafter", args.drafter)
    return EngineSettings(
        model=args.model,
        drafter=args.drafter,
        horizon=args.horizon,
        batch_size=args.batch_size,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        tensor_parallel_size=args.tensor_parallel_size,
        executor=args.executor,
        enforce_eager=args.enforce_eager,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_gib=args.kv_cache_gib,
        cpu_threads=args.cpu_threads,
        trust_remote_code=args.trust_remote_code,
        language_model_only=args.language_model_only,
        spread_routing=getattr(args, "spread_routing", False),
        tree=args.tree_args,
        extra=args.engine_args,
    )


def sampling_settings(args: argparse.Namespace) -> Sampling:
    """What the flags say of the choice of tokens."""
    return Sampling(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        top_k=args.top_k,
        top_p=args.top_p,
        ignore_eos=args.ignore_eos,
    )


def check_model(argument: str, name: str) -> None:
    """Refuse a path that holds no model; a name of the form owner/model is left to vLLM."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise wanted(argument, "a model directory with a config.json", name)
    elif path.exists() or path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise wanted(argument, "an existing model directory, or a hub name owner/model", name)


@contextmanager
def log_directory() -> Iterator[Path]:
    """A directory for the engines' logs, kept when one fails: its error names the log."""
    path = Path(mkdtemp(prefix="kdtree-"))
    try:
        yield path
    except EngineError:
        raise
    except BaseException:
        rmtree(path, ignore_errors=True)
        raise
    rmtree(path, ignore_errors=True)
