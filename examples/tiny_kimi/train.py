"""Train the miniature target and its drafter, and save both.

    python -m examples.tiny_kimi.train --corpus corpus --out out      one GPU, minutes
    python -m examples.tiny_kimi.train --smoke --out out              any CPU, under a minute

The corpus is made by `python -m examples.tiny_kimi.data`; --smoke makes its own small one.
"""

import argparse
import shutil
import sysconfig
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .config import DrafterConfig, TargetConfig
from .data import build_corpus
from .drafter_model import Drafter
from .evaluate import measure, read_prompts
from .export import round_to_bf16, save_drafter, save_target, sha256
from .optim import Clock, autocast
from .target_model import Target
from .train_drafter import DrafterRun, train_drafter, write_text
from .train_target import TargetRun, heldout_loss, train_target


@dataclass(frozen=True)
class Plan:
    """One whole run."""

    target: TargetRun = field(default_factory=TargetRun)
    drafter: DrafterRun = field(default_factory=DrafterRun)
    eval_prompts: int = 192
    eval_tokens: int = 64

    def within(self, minutes: float) -> "Plan":
        """The same plan, each training cut to its share of the time."""
        return replace(
            self,
            target=replace(self.target, max_seconds=minutes * 60 * 0.42),
            drafter=replace(self.drafter, max_seconds=minutes * 60 * 0.42),
        )


SMOKE = Plan(
    target=TargetRun(steps=3, batch=2, seq_len=64, warmup_steps=1, log_every=2, heldout_tokens=300),
    drafter=DrafterRun(
        steps=3, rounds=1, rows=4, max_prompts=(32,), num_new=16, batch=4, anchors=4, log_every=2
    ),
    eval_prompts=1,
    eval_tokens=4,
)


def load_corpus(folder: Path, device: torch.device) -> tuple[Tensor, Tensor]:
    """Training and held-out tokens, [n] int32 each."""
    with np.load(folder / "corpus.npz") as arrays:
        parts = [torch.from_numpy(arrays[k].astype(np.int32)) for k in ("train", "heldout")]
    return parts[0].to(device), parts[1].to(device)


def run(plan: Plan, corpus: Path, out: Path, device: torch.device) -> None:
    """Train, save after each training, measure."""
    clock = Clock()
    torch.manual_seed(0)
    train, heldout = load_corpus(corpus, device)
    target = Target(TargetConfig()).to(device)
    drafter = Drafter(DrafterConfig(), target.cfg.hidden_size).to(device)
    train_target(target, train, heldout, plan.target, clock)
    round_to_bf16(target)
    held = heldout_loss(target.eval(), heldout[: plan.target.heldout_tokens], plan.target.seq_len)
    weights = [save_target(target, out / "target")]
    for file in sorted((corpus / "tokenizer").iterdir()):
        shutil.copy(file, out / "target")
    clock.log(f"target in bfloat16: held-out {held:.3f}")

    text = write_text(target, train, plan.drafter, clock)
    train_drafter(target, drafter, text, plan.drafter, clock)
    round_to_bf16(drafter)
    weights.append(save_drafter(drafter, target.cfg, out / "drafter"))
    tokenizer = corpus / "tokenizer" / "tokenizer.json"
    prompts = read_prompts(corpus / "heldout.jsonl", tokenizer, plan.eval_prompts)
    with autocast(device):
        acceptance = measure(target, drafter, prompts, plan.eval_tokens)
    clock.log(f"{len(prompts)} held-out prompts x {plan.eval_tokens} tokens: {acceptance}")
    for path in weights:
        clock.log(f"{path.relative_to(out)}: {path.stat().st_size} bytes, sha256 {sha256(path)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, help="folder made by examples.tiny_kimi.data")
    parser.add_argument("--out", type=Path, required=True, help="gets target/ and drafter/")
    parser.add_argument("--max-minutes", type=float, help="cut both trainings to fit")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few files")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    plan, corpus = (SMOKE if args.smoke else Plan()), args.corpus
    if args.max_minutes:
        plan = plan.within(args.max_minutes)
    if corpus is None:
        corpus = args.out / "corpus"
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        build_corpus(stdlib, corpus, *((12, 1) if args.smoke else ()))
    run(plan, corpus, args.out, torch.device(args.device))


if __name__ == "__main__":
    main()
