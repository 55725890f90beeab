"""build_candidates, and what it has to give."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kdtree_runner import ops


def candidates(logits: Tensor, topk: int, vocab_offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    values = torch.full((rows, topk), torch.nan)
    ids = torch.full((rows, topk), -7, dtype=torch.int32)
    lse = torch.full((rows, ops.LSE_WORDS), -7, dtype=torch.int64)
    ops.build_candidates(logits, values, ids, lse, vocab_offset)
    return values, ids, lse


def expected_candidates(row: Tensor, topk: int) -> list[tuple[float, int]]:
    pairs = [(x, i) for i, x in enumerate(row.float().tolist()) if x > -math.inf]
    pairs.sort(key=lambda pair: (-pair[0], pair[1]))
    return (pairs + [(-math.inf, -1)] * topk)[:topk]
