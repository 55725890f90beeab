"""What both trainings share: the optimiser, its schedule, a clock, autocast."""

import time
from collections.abc import Iterable

import torch
from torch import nn


class Clock:
    """Time since the start, for log lines and for stopping in time."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def log(self, text: str) -> None:
        print(f"[{self.seconds():6.1f} s] {text}", flush=True)


class Schedule:
    """Warm-up, then a linear way down to 0, over whichever is spent first: steps or seconds."""

    def __init__(self, max_steps: int, max_seconds: float, warmup_steps: int) -> None:
        self.max_steps, self.max_seconds, self.warmup_steps = (max_steps, max_seconds, warmup_steps)
        self.clock = Clock()

    def progress(self, step: int) -> float:
        """0 at the start, 1 when the budget is spent."""
        return min(1.0, max(step / self.max_steps, self.clock.seconds() / self.max_seconds))

    def factor(self, step: int) -> float:
        """Factor on the learning rate."""
        return min((step + 1) / self.warmup_steps, 1.0) * (1.0 - self.progress(step))


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW; norms and embeddings do not decay (the mask token's row gets no gradient)."""
    decayed, kept = [], []
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            plain = parameter.ndim < 2 or isinstance(module, nn.Embedding)
            (kept if plain else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    fused = decayed[0].is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-10, fused=fused)


def apply_step(optimizer: torch.optim.AdamW, parameters: Iterable[nn.Parameter], lr: float) -> None:
    """Clip, set the learning rate, step, clear."""
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, plain float32 on a CPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
