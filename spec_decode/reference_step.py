"""A whole decode step in plain torch, of the operators in reference.py. Not used at run time.

The target is any function of tokens, positions and an attention it calls once a layer, so that a
test can hand in a toy and a reader can follow one step from draft to commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kdtree_runner.spec_decode.reference import (
    Trees,
    build_select,
    kv_commit,
    log_sum_exp,
    positions,
    top_candidates,
    tree_accept,
    verify_attention,
)

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""attend(layer, q [num_tokens, H, W], kv rows [num_tokens, W]) -> [num_tokens, H, value_dim]."""
Forward = Callable[[Tensor, Tensor, Attend], Tensor]
"""forward(tokens [num_tokens], positions [num_tokens], attend) -> logits [num_tokens, V]."""


@dataclass
class PagedCache:
    """layers: each [pages, page_size, W]. block_table: [B, max_pages] int32."""

    layers: list[Tensor]
    block_table: Tensor
    softmax_scale: float
    value_dim: int

    def slots(self, base: Tensor, num_tokens: int) -> Tensor:
        """Cache slots of the tokens at sequence index base .. base + num_tokens - 1.

        base: [B] int64. Returns [B, num_tokens] int64.
        """
        page_size = self.layers[0].shape[1]
        idx = base[:, None] + torch.arange(num_tokens)
        return self.block_table.long().gather(1, idx // page_size) * page_size + idx % page_size


def verify(
    forward: Forward, tokens: Tensor, base: Tensor, cache: PagedCache, trees: Trees | None = None
) -> Tensor:
    """One target pass over T tokens of every request, written into the cache as it goes.

    tokens: [B, T] int64. base: [B] int64, tokens in the cache before them. trees: None for chains.
    Returns [B, T] int64, the target's greedy token at each.
    """
    batch, num_tokens = tokens.shape
    slots = cache.slots(base, num_tokens).flatten()
    starts = torch.arange(batch + 1, dtype=torch.int32) * num_tokens
    depths = torch.arange(num_tokens).expand(batch, -1) if trees is None else trees.depths

    def attend(layer: int, q: Tensor, rows: Tensor) -> Tensor:
        cache.layers[layer].flatten(0, 1)[slots] = rows
        out, _ = verify_attention(
            q,
            cache.layers[layer],
            cache.block_table,
            base + num_tokens,
            starts,
            cache.softmax_scale,
            tree_rows=None if trees is None else torch.arange(batch),
            depths=depths,
            ancestors=None if trees is None else trees.ancestors,
            value_dim=cache.value_dim,
            dtype=q.dtype,
        )
        return out

    logits = forward(tokens.flatten(), positions(base, depths).flatten(), attend)
    return logits.argmax(dim=-1).view(batch, num_tokens)


def ddtree_step(
    forward: Forward,
    draft_logits: Tensor,
    anchors: Tensor,
    base: Tensor,
    cache: PagedCache,
    num_nodes: int,
    topk: int,
    spine: bool = False,
) -> tuple[Tensor, Tensor]:
    """One greedy decode step of every request: grow the trees, verify, accept, commit.

    draft_logits: [B, L, V], the drafter's at the L positions after the anchor.
    anchors: [B] int64, last committed tokens, not yet in the cache.
    base: [B] int64, positions of the anchors, and so the tokens already in the cache.
    Returns emitted [B, T] int64, 0 past the end, and num_emitted [B] int32.
    """
    batch, horizon, _ = draft_logits.shape
    rows = draft_logits.flatten(0, 1)
    values, ids = (x.view(batch, horizon, topk) for x in top_candidates(rows, topk))
    trees = build_select(values, ids, log_sum_exp(rows).view(batch, horizon), num_nodes, spine)
    tokens = torch.cat([anchors[:, None], trees.tokens], dim=1)
    targets = verify(forward, tokens, base, cache, trees)
    starts = torch.arange(batch + 1, dtype=torch.int32) * (num_nodes + 1)
    path, emitted, num_emitted = tree_accept(
        tokens.flatten(),
        targets.flatten(),
        starts,
        max_path=horizon + 1,
        emitted_width=max(horizon, num_nodes) + 1,
        tree_rows=torch.arange(batch),
        parents=trees.parents,
    )
    slots = cache.slots(base, num_nodes + 1).flatten()
    kv_commit(cache.layers, slots, starts, path, num_emitted)
    return emitted, num_emitted
