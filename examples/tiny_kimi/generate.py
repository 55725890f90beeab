"""Let the target write: many continuations at once, all sequences at the same position."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .target_model import KVCache, Target


@dataclass
class Sequences:
    """Prompts with the target's own continuations.

    ids: [B, S] int64; num_prompt: [B] int64, the tokens of each row that were given.
    """

    ids: Tensor
    num_prompt: Tensor


def _pick(logits: Tensor, temperature: Tensor, generator: torch.Generator | None) -> Tensor:
    """Argmax where the temperature is 0, a sample elsewhere (Gumbel noise).

    logits: [B, V] float32; temperature: [B] float32. Returns [B] int64.
    """
    if generator is None:
        return logits.argmax(-1)
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device)
    gumbel = -(-(uniform.clamp(1e-9, 1 - 1e-7)).log()).log()
    return (logits + temperature[:, None] * gumbel).argmax(-1)


@torch.no_grad()
def continue_prompts(
    target: Target,
    prompts: Tensor,
    num_prompt: Tensor,
    total_len: int,
    temperature: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Sequences:
    """Continue every prompt up to total_len tokens.

    All rows are run from the shortest prompt's end in lockstep; a row whose prompt is longer is
    fed its own next token instead of the target's choice.

    prompts: [B, P] int64, valid up to num_prompt [B]; temperature: [B], None for all greedy.
    """
    batch, shortest = len(prompts), int(num_prompt.min())
    ids = prompts.new_zeros(batch, total_len)
    ids[:, : prompts.shape[1]] = prompts[:, :total_len]
    generator = generator if temperature is not None else None
    if temperature is None:
        temperature = torch.zeros(batch, device=ids.device)
    like = target.embed_tokens.weight
    if torch.is_autocast_enabled(ids.device.type):
        like = like.to(torch.get_autocast_dtype(ids.device.type))
    caches = [KVCache(target.cfg, batch, total_len, like) for _ in target.layers]
    hidden, _ = target(ids[:, :shortest], caches)
    for position in range(shortest, total_len):
        chosen = _pick(target.logits(hidden[:, -1]), temperature, generator)
        given = position < num_prompt
        ids[:, position] = torch.where(given, ids[:, position], chosen)
        if position + 1 < total_len:
            hidden, _ = target(ids[:, position : position + 1], caches, position)
    return Sequences(ids, num_prompt)
