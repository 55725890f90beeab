"""A vocabulary in shards gives the trees and the argmax of one in one piece, ties included."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdtree_runner import ops
from kdtree_runner.spec_decode.tree import TreeState

pytest.importorskip("vllm")

from kdtree_runner.spec_decode.vocab_parallel import (
    CandidateBuffers,
    VocabShard,
    argmax_keys,
    argmax_tokens,
)

VOCAB, HORIZON, TOPK, NODES, BATCH = 1000, 5, 12, 24, 3
BORDERS = [
    [0, 1000],
    [0, 500, 1000],
    [0, 250, 500, 750, 1000],
    [0, 7, 8, 999, 1000],  # shards of one token, and smaller than K
]


def cases() -> dict[str, Tensor]:
    """[B * L, V] logits by name."""
    rows = BATCH * HORIZON
    noise = torch.randn(rows, VOCAB)
    coarse = (noise * 2).round()  # many ties
    border = torch.full((rows, VOCAB), -4.0)
    border[:, [249, 250, 499, 500, 749, 750, 7, 8]] = 3.0  # ties across every border
    zeros = torch.zeros(rows, VOCAB)
    zeros[:, ::2] = -0.0
    masked = noise.clone()
    masked[:, 400:] = float("-inf")  # nothing in the last shards
    return {"noise": noise, "ties": coarse, "border": border, "zeros": zeros, "masked": masked}


CASES = ("noise", "ties", "border", "zeros", "masked")
DTYPES = (torch.float32, torch.bfloat16)


def sharded(logits: Tensor, borders: list[int], topk: int) -> tuple[Tensor, Tensor, Tensor]:
    """What every rank holds after the exchange; all are checked to hold the same."""
    num_shards, rows = len(borders) - 1, logits.shape[0]
    ranks = [CandidateBuffers(rows + 2, topk, num_shards, "cpu") for _ in range(num_shards)]
    messages: list[Tensor] = []
    pieces = [logits[:, a:b] for a, b in pairwise(borders)]
    for rank, piece, offset in zip(ranks, pieces, borders, strict=False):

        def send(own: Tensor) -> Tensor:
            messages.append(own.clone())
            return own.repeat(num_shards)

        rank.fill(piece, offset, send)
    whole = torch.cat(messages)
    results = [
        rank.fill(piece, offset, lambda own: whole)
        for rank, piece, offset in zip(ranks, pieces, borders, strict=False)
    ]
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    return results[0]


def tree(values: Tensor, ids: Tensor, lse: Tensor) -> dict[str, Tensor]:
    state = TreeState(BATCH, NODES, HORIZON, "cpu")
    tokens = torch.zeros(BATCH, NODES, dtype=torch.int64)
    scores = torch.zeros(BATCH, NODES, dtype=torch.int64)
    ops.build_select(
        values,
        ids,
        lse,
        horizon=HORIZON,
        spine=False,
        chain_only=None,
        tree_rows=None,
        base=None,
        tokens=tokens,
        parents=state.parents,
        depths=state.depths,
        ancestors=state.ancestors,
        scores=scores,
    )
    return {"tokens": tokens, "scores": scores, "parents": state.parents, "depths": state.depths}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("borders", BORDERS[1:])
@pytest.mark.parametrize("case", CASES)
def test_trees(case: str, borders: list[int], dtype: torch.dtype) -> None:
    logits = cases()[case].to(dtype)
    want = tree(*CandidateBuffers(len(logits), TOPK, 1, "cpu").fill(logits))
    got = tree(*sharded(logits, borders, TOPK))
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize("case", CASES)
def test_argmax(case: str, borders: list[int], dtype: torch.dtype) -> None:
    logits = cases()[case].to(dtype)
    pieces = pairwise(borders)
    keys = torch.stack([argmax_keys(logits[:, a:b], a) for a, b in pieces])
    assert torch.equal(argmax_tokens(keys), logits.float().argmax(dim=1))


def test_argmax_of_an_empty_shard() -> None:
    logits = torch.tensor([[-3.0, -1.0], [-float("inf"), -2.0]])
    keys = torch.stack([argmax_keys(logits, 0), argmax_keys(logits[:, :0], 2)])
    assert argmax_tokens(keys).tolist() == [1, 1]


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, -1e-40, 3.4e38, -3.4e38, -float("inf")])
def test_keys_keep_the_order_of_floats(value: float) -> None:
    both = torch.tensor([[value], [1.5]])
    keys = argmax_keys(both, 0)
    assert bool(keys[0] < keys[1]) == (value < 1.5)


def head(tp_size: int) -> Any:
    indices = SimpleNamespace(org_vocab_start_index=64, num_org_elements=60)
    return SimpleNamespace(tp_size=tp_size, shard_indices=indices)


def test_shard_of_a_model() -> None:
    def process(lm_head: Any, hidden: Tensor, skip_gather: bool) -> Tensor:
        assert skip_gather
        return hidden.new_ones(hidden.shape[0], 64)  # four columns of padding

    text = SimpleNamespace(logits_processor=process, lm_head=head(2), draft_id_to_target_id=None)
    for model in (text, SimpleNamespace(language_model=text)):
        shard = VocabShard.of(model)
        assert shard is not None
        assert (shard.num_shards, shard.offset, shard.size) == (2, 64, 60)
        assert shard.logits(torch.zeros(5, 8)).shape == (5, 60)
    alone = SimpleNamespace(logits_processor=process, lm_head=head(1))
    own_ids = SimpleNamespace(
        logits_processor=process, lm_head=head(2), draft_id_to_target_id=torch.zeros(1)
    )
    assert [VocabShard.of(m) for m in (alone, own_ids, SimpleNamespace())] == [None] * 3
