"""Next-token training of the target, with DeepSeek's balancing of the experts."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .optim import Clock, Schedule, apply_step, autocast, make_optimizer
from .target_model import Target


@dataclass(frozen=True)
class TargetRun:
    """How the target is trained; lengths in tokens."""

    steps: int = 3600
    max_seconds: float = 200.0
    batch: int = 32
    seq_len: int = 1024
    lr: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 100
    balance_rate: float = 1e-3
    log_every: int = 200
    heldout_tokens: int = 200_000


def windows(tokens: Tensor, seq_len: int, batch: int, seed: int = 0) -> Iterator[Tensor]:
    """Endless batches of packed windows, every epoch in another order and another phase.

    tokens: [num_tokens] int32. Yields [batch, seq_len + 1] int64.
    """
    rng, offsets = np.random.default_rng(seed), np.empty(0, dtype=np.int64)
    within = torch.arange(seq_len + 1, device=tokens.device)
    while True:
        while len(offsets) < batch:
            starts = np.arange(rng.integers(seq_len), len(tokens) - seq_len - 1, seq_len)
            offsets = np.concatenate((offsets, rng.permutation(starts)))
        now, offsets = offsets[:batch], offsets[batch:]
        yield tokens[torch.from_numpy(now).to(tokens.device)[:, None] + within].long()


def next_token_loss(target: Target, batch: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token. batch: [B, S + 1] int64."""
    hidden, _ = target(batch[:, :-1])
    return F.cross_entropy(target.logits(hidden).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def heldout_loss(target: Target, tokens: Tensor, seq_len: int, batch: int = 16) -> float:
    """Mean cross-entropy over the held-out tokens, windows side by side. tokens: [n] int32."""
    was_training = target.training
    target.eval()
    num_windows = (len(tokens) - 1) // seq_len
    within = torch.arange(seq_len + 1, device=tokens.device)
    starts = torch.arange(num_windows, device=tokens.device)[:, None] * seq_len
    rows = tokens[starts + within].long()
    with autocast(tokens.device):
        losses = [next_token_loss(target, part).item() * len(part) for part in rows.split(batch)]
    target.train(was_training)
    return sum(losses) / num_windows


def expert_shares(target: Target) -> str:
    """Smallest and largest share of the last batch's choices an expert got, for each layer."""
    shares = [router.load / router.load.sum() for router in target.routers()]
    return " ".join(f"{float(s.min()):.3f}..{float(s.max()):.3f}" for s in shares)


def train_target(
    target: Target, train: Tensor, heldout: Tensor, run: TargetRun, clock: Clock
) -> tuple[float, float]:
    """Train in place. train, heldout: [n] int32. Returns the last (train, held-out) losses."""
    optimizer = make_optimizer(target, run.lr, run.weight_decay)
    schedule = Schedule(run.steps, run.max_seconds, run.warmup_steps)
    batches, recent, step = windows(train, run.seq_len, run.batch), [], 0
    heldout = heldout[: run.heldout_tokens]
    target.train()
    while schedule.progress(step) < 1:
        with autocast(train.device):
            loss = next_token_loss(target, next(batches))
        loss.backward()
        factor = schedule.factor(step)
        apply_step(optimizer, target.parameters(), run.lr * factor)
        for router in target.routers():
            router.balance(run.balance_rate * factor)  # fades out with the learning rate
        recent.append(loss.detach())
        step += 1
        if step % run.log_every == 0:
            mean = torch.stack(recent[-run.log_every :]).mean().item()
            held = heldout_loss(target, heldout, run.seq_len)
            clock.log(f"target step {step}: train {mean:.3f} held-out {held:.3f}")
    mean = torch.stack(recent[-run.log_every :]).mean().item()
    held = heldout_loss(target, heldout, run.seq_len)
    clock.log(
        f"target: {step} steps, {step * run.batch * run.seq_len / len(train):.1f} epochs, "
        f"train {mean:.3f} held-out {held:.3f}, expert shares {expert_shares(target)}"
    )
    return mean, held
