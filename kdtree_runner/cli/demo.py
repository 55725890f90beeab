"""`kdtree demo`: the same text by plain decoding, vLLM's chain and DDTree, side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from kdtree_runner.cli.engine import EngineSettings, Mode, Sampling
from kdtree_runner.cli.errors import EngineError, ExitCode, UserError
from kdtree_runner.cli.verify import check_model, choose_prompts, log_directory
from kdtree_runner.platform import is_cpu_build

TINY_KIMI = Path("examples") / "tiny_kimi"


def run(args: argparse.Namespace) -> ExitCode:
    """Run the three engines one after another, each shown as it goes."""
    settings = EngineSettings(
        model=args.model or default_model("--model", "target"),
        drafter=args.drafter or default_model("--drafter", "drafter"),
        batch_size=1,
        dtype=args.dtype or ("float32" if is_cpu_build() else "bfloat16"),
        cpu_threads=args.cpu_threads,
        enforce_eager=True,  # compiling for three short runs would take longer than they do
    )
    check_model("--model", settings.model)
    check_model("--drafter", settings.drafter)
    sampling = Sampling(max_tokens=args.max_tokens, ignore_eos=True)
    prompts = choose_prompts(args.prompts, args.num_prompts)

    from kdtree_runner.cli.report import Check, EngineRun
    from kdtree_runner.cli.stage import Stage, show_outcome
    from kdtree_runner.cli.supervise import Job, run_job

    runs = []
    modes = [Mode("plain"), Mode("chain"), Mode("tree", args.tree_budget)]
    texts = [prompt.prompt or "" for prompt in prompts]
    with log_directory() as logs, Stage(modes, texts) as stage:
        for mode in modes:
            job = Job(
                mode,
                settings,
                sampling,
                prompts,
                gaps=False,
                one_by_one=True,
                stream=True,
                snapshots=True,
            )
            runs.append(EngineRun(mode, run_job(job, logs, stage.begin(mode), args.timeout)))
    baseline, chain, tree = runs
    # Epsilon 0 excuses nothing: the demo's word is equal or not.
    check = Check(settings, sampling, True, 0.0, baseline, [tree], chain)
    show_outcome(check, stage)
    if check.idle():
        raise EngineError("nothing was shown: the tree engine never drafted a token")
    return check.exit_code


def default_model(argument: str, part: str) -> str:
    """The miniature pair of the repository that this package lies in, or that we are in."""
    checkout = Path(__file__).resolve().parents[2]
    places = [checkout / TINY_KIMI / part, Path.cwd() / TINY_KIMI / part]
    for place in places:
        if (place / "config.json").is_file():
            return str(place)
    raise UserError(
        f"{argument}: wanted the miniature {part} in {places[0]}, got no config.json there; "
        f"run in a checkout of the repository or name a model"
    )
