"""Training of the DFlash drafter on text that the target wrote itself, by distillation."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .drafter_model import Drafter
from .generate import Sequences, continue_prompts
from .optim import Clock, Schedule, apply_step, autocast, make_optimizer
from .target_model import Target


@dataclass(frozen=True)
class DrafterRun:
    """How the drafter is trained; lengths in tokens."""

    steps: int = 4000
    max_seconds: float = 200.0
    rounds: int = 15
    rows: int = 8192
    max_prompts: tuple[int, ...] = (32, 64, 128, 256, 384)
    num_new: int = 128
    greedy_share: float = 0.75
    batch: int = 128
    anchors: int = 32
    lr: float = 2e-3
    weight_decay: float = 0.05
    warmup_steps: int = 100
    soft_share: float = 0.3
    gamma: float = 4.0
    log_every: int = 200


def write_text(target: Target, train: Tensor, run: DrafterRun, clock: Clock) -> list[Sequences]:
    """Continuations of prompts cut from the training files, a round for every prompt length.

    train: [n] int32. Prompts of a round have max_prompt / 2 ... max_prompt tokens. Most rows are
    greedy, as greedy acceptance is the aim; the rest are sampled at a temperature of 0.5 to 1.
    """
    generator = torch.Generator(train.device).manual_seed(1)
    rounds = []

    def uniform(count: int) -> Tensor:
        return torch.rand(count, generator=generator, device=train.device)

    for i in range(run.rounds):
        max_prompt = run.max_prompts[i % len(run.max_prompts)]
        starts = (uniform(run.rows) * (len(train) - max_prompt)).long()
        prompts = train[starts[:, None] + torch.arange(max_prompt, device=train.device)].long()
        num_prompt = max_prompt // 2 + (uniform(run.rows) * (max_prompt // 2 + 1)).long()
        temperature = 0.5 + 0.5 * uniform(run.rows)
        temperature[uniform(run.rows) < run.greedy_share] = 0.0
        with autocast(train.device):
            text = continue_prompts(
                target, prompts, num_prompt, max_prompt + run.num_new, temperature, generator
            )
        rounds.append(text)
    num_new = sum(int((r.ids.shape[1] - r.num_prompt).sum()) for r in rounds)
    clock.log(f"the target wrote {num_new} tokens after {run.rounds * run.rows} prompts")
    return rounds


def batches(rounds: list[Sequences], batch: int, seed: int = 0) -> Iterator[Sequences]:
    """Endless batches of rows of one round (so of one length), shuffled every epoch."""
    rng = np.random.default_rng(seed)
    while True:
        epoch = []
        for i, text in enumerate(rounds):
            rows = rng.permutation(len(text.ids))
            epoch += [(i, part) for part in np.split(rows, range(batch, len(rows), batch))]
        for j in rng.permutation(len(epoch)):
            i, rows = epoch[j]
            picked = torch.from_numpy(rows).to(rounds[i].ids.device)
            yield Sequences(rounds[i].ids[picked], rounds[i].num_prompt[picked])


def pick_anchors(text: Sequences, count: int, horizon: int) -> Tensor:
    """Random positions of written tokens with a whole block behind them. Returns [B, count]."""
    span = text.ids.shape[1] - horizon - text.num_prompt
    uniform = torch.rand(len(text.ids), count, device=text.ids.device)
    return text.num_prompt[:, None] + (uniform * span[:, None]).long()


def block_loss(
    target: Target, drafter: Drafter, text: Sequences, anchors: Tensor, run: DrafterRun
) -> tuple[Tensor, Tensor]:
    """Cross-entropy against the written token and the target's own distribution, mixed.

    Position k of a block counts exp(-(k - 1) / gamma): it matters only if all before it held.
    anchors: [B, A]. Returns the loss and the share of right argmaxes at each position, [L].
    """
    horizon = drafter.cfg.horizon
    with torch.no_grad():
        hidden, outputs = target(text.ids)
        behind = anchors[..., None] + torch.arange(horizon, device=anchors.device)  # [B, A, L]
        rows = torch.arange(len(anchors), device=anchors.device)[:, None, None]
        wanted = target.logits(hidden[rows, behind]).softmax(-1)  # for the tokens behind + 1
        wanted.mul_(run.soft_share)
        truth = text.ids[rows, behind + 1]
        wanted.scatter_add_(
            -1, truth[..., None], torch.full_like(wanted[..., :1], 1 - run.soft_share)
        )
    logits = target.logits(drafter(target, outputs, text.ids, anchors))
    per_token = logits.logsumexp(-1) - (wanted * logits).sum(-1)  # wanted sums to 1
    weight = torch.exp(-torch.arange(horizon, device=anchors.device) / run.gamma)
    right = (logits.argmax(-1) == truth).float().mean((0, 1))
    return (per_token.mean((0, 1)) * weight).sum() / weight.sum(), right


def train_drafter(
    target: Target, drafter: Drafter, rounds: list[Sequences], run: DrafterRun, clock: Clock
) -> float:
    """Train in place against the frozen target; returns the mean of the last losses."""
    target.eval().requires_grad_(False)
    optimizer = make_optimizer(drafter, run.lr, run.weight_decay)
    schedule = Schedule(run.steps, run.max_seconds, run.warmup_steps)
    source, recent, step = batches(rounds, run.batch), [], 0
    drafter.train()
    while schedule.progress(step) < 1:
        text = next(source)
        anchors = pick_anchors(text, run.anchors, drafter.cfg.horizon)
        with autocast(anchors.device):
            loss, right = block_loss(target, drafter, text, anchors, run)
        loss.backward()
        apply_step(optimizer, drafter.parameters(), run.lr * schedule.factor(step))
        recent.append(torch.cat((loss.detach()[None], right)))
        step += 1
        if step % run.log_every == 0:
            mean = torch.stack(recent[-run.log_every :]).mean(0).tolist()
            shares = " ".join(f"{share:.3f}" for share in mean[1:])
            clock.log(f"drafter step {step}: loss {mean[0]:.3f}, right by position {shares}")
    drafter.eval()
    mean = torch.stack(recent[-run.log_every :]).mean(0)[0].item()
    clock.log(f"drafter: {step} steps, loss {mean:.3f}")
    return mean
