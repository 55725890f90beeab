"""Candidates and argmax over a vocabulary whose shards lie on the ranks of tensor parallelism.

What ranks exchange of a row are its K best candidates and one log-sum-exp, or one key: never its
logits. Merging is exact, so every rank gets what one rank with all logits would get, ties included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from kdtree_runner import ops

AllGather = Callable[[Tensor], Tensor]  # [n] of each rank -> [S * n], in the order of the ranks
LSE_INTS = 2 * ops.LSE_WORDS  # int32 of one log-sum-exp
TOKEN_BITS = 0x7FFFFFFF


def all_gather(own: Tensor) -> Tensor:
    """[n] of each rank -> [S * n], of any dtype of 4 or 8 bytes.

    Sent as float32, which nothing looks at: vLLM's communicator on a CPU knows no integers.
    """
    gathered: Tensor = get_tp_group().all_gather(own.view(torch.float32), dim=0)
    return gathered.view(own.dtype)


@dataclass(frozen=True)
class VocabShard:
    """One rank's part of a model's output head, as vLLM keeps it.

    num_shards: S. offset: token id of column 0. size: columns that are tokens; padding follows.
    """

    processor: Any
    head: Any
    num_shards: int
    offset: int
    size: int

    @classmethod
    def of(cls, model: Any) -> VocabShard | None:
        """The shard of a model, or of the language model inside it; None where there is but one.

        A drafter with a vocabulary of its own is not split: its ids are not the target's.
        """
        for module in (model, getattr(model, "language_model", None)):
            processor = getattr(module, "logits_processor", None)
            head = getattr(module, "lm_head", None)
            if processor is None or head is None:
                continue
            own_ids = getattr(module, "draft_id_to_target_id", None) is not None
            if own_ids or getattr(head, "tp_size", 1) == 1:
                return None
            indices = head.shard_indices
            place = (indices.org_vocab_start_index, indices.num_org_elements)
            return cls(processor, head, head.tp_size, *place)
        return None

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[rows, size] logits of this rank's tokens. hidden_states: [rows, hidden]."""
        logits: Tensor = self.processor(self.head, hidden_states, skip_gather=True)
        return logits[:, : self.size]


class CandidateBuffers:
    """Candidates of up to `rows` rows from all shards, persistent, as build_select wants them."""

    def __init__(self, rows: int, topk: int, num_shards: int, device: torch.device | str) -> None:
        self.topk, self.num_shards = topk, num_shards
        total = num_shards * rows

        def zeros(count: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self._values = zeros(total * topk, torch.float32)
        self._ids = zeros(total * topk, torch.int32)
        self._lse = zeros(total * ops.LSE_WORDS, torch.int64)
        width = LSE_INTS + 2 * topk
        self._own = zeros(rows * width if num_shards > 1 else 0, torch.int32)

    def views(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """values [S, rows, K] float32, ids [S, rows, K] int32, lse [S, rows, 3] int64."""

        def view(flat: Tensor, width: int) -> Tensor:
            return flat[: self.num_shards * rows * width].view(self.num_shards, rows, width)

        return (
            view(self._values, self.topk),
            view(self._ids, self.topk),
            view(self._lse, ops.LSE_WORDS),
        )

    def fill(
        self, logits: Tensor, offset: int = 0, gather: AllGather | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates of every shard from this rank's logits; returns their views.

        logits: [rows, V of this shard]. offset: token id of column 0. gather: all_gather, or
        None for one shard, which then is the whole vocabulary.
        """
        rows, k = logits.shape[0], self.topk
        values, ids, lse = self.views(rows)
        if gather is None:
            ops.build_candidates(logits, values[0], ids[0], lse[0], offset)
            return values, ids, lse
        # One message: the log-sum-exps first, which must be aligned to 8 bytes.
        ends = (rows * LSE_INTS, rows * (LSE_INTS + k), rows * (LSE_INTS + 2 * k))
        own = self._own[: ends[2]]
        parts = (own[: ends[0]], own[ends[0] : ends[1]], own[ends[1] :])
        ops.build_candidates(
            logits,
            parts[1].view(torch.float32).view(rows, k),
            parts[2].view(rows, k),
            parts[0].view(torch.int64).view(rows, ops.LSE_WORDS),
            offset,
        )
        gathered = gather(own).view(self.num_shards, -1)
        lse.view(self.num_shards, -1).view(torch.int32).copy_(gathered[:, : ends[0]])
        values.view(self.num_shards, -1).view(torch.int32).copy_(gathered[:, ends[0] : ends[1]])
        ids.view(self.num_shards, -1).copy_(gathered[:, ends[1] :])
        return values, ids, lse


def argmax_keys(logits: Tensor, offset: int) -> Tensor:
    """[rows] int64, the largest logit of a shard and its token, larger for the better of two.

    logits: [rows, V of this shard]. Of equal logits (-0 equals 0) the lower token wins, in a shard
    and between shards, as in vLLM's argmax over the whole row.
    """
    if logits.shape[1] == 0:
        shape, least = (logits.shape[0],), torch.iinfo(torch.int64).min
        return torch.full(shape, least, dtype=torch.int64, device=logits.device)
    best, column = logits.max(dim=1)
    bits = (best.float() + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & TOKEN_BITS)  # integers in the order of the floats
    return (ordered.long() << 32) | (TOKEN_BITS - offset - column)


def argmax_tokens(keys: Tensor) -> Tensor:
    """[rows] int64, the best token of all shards. keys: [S, rows], argmax_keys of each."""
    return TOKEN_BITS - (keys.amax(dim=0) & TOKEN_BITS)
