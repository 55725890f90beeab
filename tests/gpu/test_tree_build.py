"""build_candidates, build_select and build_ddtree on the GPU: the bits of the CPU's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kdtree_runner import ops

from .conftest import assert_equal, to_cuda

pytestmark = pytest.mark.gpu

UNTOUCHED = -7


def make_logits(kind: str, rows: int, vocab: int, dtype: torch.dtype, padding: int = 0) -> Tensor:
    """[rows, vocab] with `padding` NaN behind each row."""
    logits = torch.randn(rows, vocab + padding) * 3
    if kind == "ties":
        logits = (logits * 0.5).round()
    elif kind == "equal":
        logits = torch.where(torch.rand_like(logits) < 0.1, -0.0, 0.0)
    elif kind == "special":
        pick = torch.rand_like(logits)
        logits[pick < 0.2] = math.nan
        logits[(pick > 0.2) & (pick < 0.5)] = -math.inf
    elif kind == "huge":
        logits *= 1e6
        logits[torch.rand_like(logits) < 0.01] = math.inf
    elif kind == "peaked":
        logits *= 12
        logits[:, 7 % vocab] = 80.0
    elif kind == "ascending":
        logits = torch.linspace(-30, 30, vocab + padding).expand(rows, -1).clone()
    elif kind == "none":
        logits[:] = -math.inf
        logits[:, ::3] = math.nan
    logits[:, vocab:] = math.nan
    return logits.to(dtype)[:, :vocab]


def candidates(logits: Tensor, topk: int, offset: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rows, device = logits.shape[0], logits.device
    values = torch.full((rows, topk), math.nan, device=device)
    ids = torch.full((rows, topk), UNTOUCHED, dtype=torch.int32, device=device)
    lse = torch.full((rows, ops.LSE_WORDS), UNTOUCHED, dtype=torch.int64, device=device)
    ops.build_candidates(logits, values, ids, lse, offset)
    return values, ids, lse


KINDS = ("normal", "ties", "equal", "special", "huge", "peaked", "ascending", "none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rows, vocab, topk, padding",
    [(1, 1, 1, 0), (3, 7, 5, 2), (5, 1000, 64, 1), (7, 163840, 16, 0), (3, 163841, 64, 3)],
)
def test_candidates_match_the_cpu(
    rows: int, vocab: int, topk: int, padding: int, kind: str, dtype: torch.dtype
) -> None:
    logits = make_logits(kind, rows, vocab, dtype, padding)
    for got, want in zip(
        candidates(to_cuda(logits), topk, 5), candidates(logits, topk, 5), strict=True
    ):
        assert_equal(got, want)


def test_candidates_match_torch(cuda: torch.device) -> None:
    logits = torch.randn(7, 163840, device=cuda) * 4
    values, ids, _ = candidates(logits, 32)
    want = torch.topk(logits, 32)
    assert torch.equal(values, want.values)
    assert torch.equal(ids.long(), want.indices)


def outputs(batch: int, rows: int, num_nodes: int, horizon: int) -> dict[str, Tensor]:
    num_tokens = num_nodes + 1

    def filled(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, UNTOUCHED, dtype=dtype)

    return {
        "tokens": filled(batch, num_nodes, dtype=torch.int64),
        "parents": filled(rows, num_tokens),
        "depths": filled(rows, num_tokens),
        "ancestors": filled(rows, num_tokens, horizon + 1),
        "positions": filled(batch, num_tokens, dtype=torch.int64),
        "first_child": filled(rows, num_tokens),
        "next_sibling": filled(rows, num_tokens),
        "scores": filled(batch, num_nodes, dtype=torch.int64),
    }


def check_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, tensor in want.items():
        assert_equal(got[name], tensor, name)


@pytest.mark.parametrize("spine", [False, True])
@pytest.mark.parametrize("scale", [0.0, 0.4, 4.0])
@pytest.mark.parametrize(
    "batch, horizon, topk, num_nodes, shards",
    [
        (1, 1, 1, 1, 1),
        (1, 7, 16, 16, 1),
        (3, 7, 16, 31, 4),
        (5, 15, 64, 64, 2),
        (2, 32, 64, 255, 8),
        (33, 3, 4, 200, 1),
    ],
)
def test_select_matches_the_cpu(
    batch: int, horizon: int, topk: int, num_nodes: int, shards: int, scale: float, spine: bool
) -> None:
    vocab, rows = 2 * topk + 3, batch * horizon
    logits = torch.randn(rows, shards * vocab) * scale
    if scale:
        logits[-1, 2:] = -math.inf  # a position with few candidates
    parts = [
        candidates(part.contiguous(), topk, i * vocab)
        for i, part in enumerate(logits.split(vocab, 1))
    ]
    merged = [torch.stack(tensors) for tensors in zip(*parts, strict=True)]
    num_rows = batch + 4
    tree_rows = torch.randperm(num_rows)[:batch].int()
    tree_rows[batch // 2] = -1
    request = {
        "chain_only": torch.rand(num_rows) < 0.3,
        "tree_rows": tree_rows,
        "base": torch.randint(0, 2**40, (batch,)),
    }
    want = outputs(batch, num_rows, num_nodes, horizon)
    got = {name: to_cuda(tensor) for name, tensor in want.items()}
    ops.build_select(*merged, horizon=horizon, spine=spine, **request, **want)
    cuda_request = {name: to_cuda(tensor) for name, tensor in request.items()}
    ops.build_select(*to_cuda(merged), horizon=horizon, spine=spine, **cuda_request, **got)
    check_same(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch, num_nodes", [(1, 8), (1, 16), (8, 32), (32, 64)])
def test_ddtree_matches_the_cpu_and_itself(batch: int, num_nodes: int, dtype: torch.dtype) -> None:
    horizon, topk = 7, min(num_nodes, 64)
    logits = make_logits("normal", batch * horizon, 20480, dtype).view(batch, horizon, -1)
    base = torch.arange(batch) * 100
    want = outputs(batch, batch, num_nodes, horizon)
    ops.build_ddtree(logits, topk, spine=True, base=base, **want)
    for _ in range(2):
        got = {k: to_cuda(v) for k, v in outputs(batch, batch, num_nodes, horizon).items()}
        ops.build_ddtree(to_cuda(logits), topk, spine=True, base=to_cuda(base), **got)
        check_same(got, want)


def test_ddtree_in_a_graph(replayed) -> None:
    batch, horizon, topk, num_nodes, vocab = 2, 7, 16, 16, 5000
    logits = torch.zeros(batch, horizon, vocab, device="cuda", dtype=torch.bfloat16)
    names = ("tokens", "parents", "depths", "ancestors")
    made = outputs(batch, batch, num_nodes, horizon)
    got = {name: to_cuda(made[name]) for name in names}
    replay = replayed(lambda: ops.build_ddtree(logits, topk, spine=False, **got))
    for _ in range(3):
        fresh = make_logits("normal", batch * horizon, vocab, torch.bfloat16)
        fresh = fresh.view(batch, horizon, vocab)
        logits.copy_(fresh)
        replay()
        want = {name: made[name].clone() for name in names}
        ops.build_ddtree(fresh, topk, spine=False, **want)
        check_same(got, want)
