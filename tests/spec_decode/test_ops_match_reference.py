"""The native tree operators against the reference: integers are equal. Attention: another file."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kdtree_runner import ops
from kdtree_runner.spec_decode import reference
from kdtree_runner.spec_decode.reference import MAX_LOGIT, SCORE_UNIT

POISON = -77  # what must not be written keeps it


@dataclass(frozen=True)
class Draft:
    """One call's sizes and how its logits are drawn. levels: number of logit values, 0: any."""

    batch: int
    horizon: int
    topk: int
    shard_size: int
    num_shards: int
    num_nodes: int
    levels: int
    share_masked: float
    dtype: torch.dtype
    seed: int

    def logits(self) -> Tensor:
        """[B * L, V] on the CPU, some of it -inf and NaN."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch * self.horizon, self.shard_size * self.num_shards)
        x = torch.randn(shape, generator=generator) * 3
        if self.levels:
            # Steps of 1/4 are exact in bfloat16; -0 and 0 must tie.
            x = torch.randint(self.levels, shape, generator=generator) / 4 - 0.0
            x[:, ::3] *= -1
        masked = torch.rand(shape, generator=generator) < self.share_masked
        x[masked] = -math.inf
        x[masked & (torch.rand(shape, generator=generator) < 0.5)] = math.nan
        return x.to(self.dtype)


def random_drafts(count: int) -> list[Draft]:
    """The same ones in every run: sizes evenly spread, their limits more often."""
    rng = random.Random(count)

    def size(limit: int) -> int:
        return rng.choice([1, limit, rng.randint(1, limit), rng.randint(1, limit)])

    return [
        Draft(
            batch=rng.randint(1, 4),
            horizon=size(32),
            topk=size(64),
            shard_size=size(300),
            num_shards=rng.randint(1, 3),
            num_nodes=size(255),
            levels=rng.choice([0, 0, 0, 1, 2, 5]),
            share_masked=rng.choice([0, 0, 0, 0.3, 0.97, 1]),
            dtype=rng.choice([torch.float32, torch.bfloat16]),
            seed=case,
        )
        for case in range(count)
    ]


def native_candidates(draft: Draft, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """values, ids and lse of every shard, on the device."""
    logits = draft.logits().to(device)
    shape = (draft.num_shards, len(logits), draft.topk)
    values = torch.full(shape, math.nan, device=device)
    ids = torch.full(shape, POISON, dtype=torch.int32, device=device)
    lse = torch.full((*shape[:2], ops.LSE_WORDS), POISON, dtype=torch.int64, device=device)
    for i, shard in enumerate(logits.split(draft.shard_size, dim=1)):  # rows stay V apart
        ops.build_candidates(shard, values[i], ids[i], lse[i], i * draft.shard_size)
    return values, ids, lse


def tree_outputs(
    batch: int, num_rows: int, num_nodes: int, horizon: int, device: torch.device
) -> dict[str, Tensor]:
    """Every output of build_select, poisoned."""
    rows = (num_rows, num_nodes + 1)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "tokens": ((batch, num_nodes), torch.int64),
        "scores": ((batch, num_nodes), torch.int64),
        "positions": ((batch, num_nodes + 1), torch.int64),
        "parents": (rows, torch.int32),
        "depths": (rows, torch.int32),
        "ancestors": ((*rows, horizon + 1), torch.int32),
        "first_child": (rows, torch.int32),
        "next_sibling": (rows, torch.int32),
    }
    return {
        name: torch.full(shape, POISON, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
    }


def native_fixed_lse(lse: Tensor) -> Tensor:
    """The log-sum-exps as the selection reads them, from the score of one node.

    lse: [S, rows, 3] int64. Returns [rows] float64 on the CPU, whole numbers of 2^-32.
    """
    num_shards, rows, _ = lse.shape
    out = tree_outputs(rows, rows, 1, 1, lse.device)
    del out["positions"]
    ops.build_select(
        torch.full((num_shards, rows, 1), -MAX_LOGIT, device=lse.device),
        torch.zeros(num_shards, rows, 1, dtype=torch.int32, device=lse.device),
        lse,
        horizon=1,
        spine=False,
        chain_only=None,
        tree_rows=None,
        base=None,
        **out,
    )
    fixed = -reference.fixed_point(MAX_LOGIT) - out["scores"][:, 0]
    return fixed.cpu().double()


def decoded_lse(lse: Tensor) -> list[float]:
    """Natural log-sum-exp of each kdtree_lse as the header defines it. lse: [rows, 3] int64."""
    found = []
    for words in lse.cpu().tolist():
        fields = struct.unpack("<iHHQQ", struct.pack("<qqq", *words))
        group, high_top, low_top, high, low = fields
        total = (((high_top << 64) | high) << 40) + ((low_top << 64) | low)
        exponent = 40 * (group - 1) - 22
        found.append(math.log(total) + exponent * math.log(2) if total else -math.inf)
    return found


def test_candidates(device: torch.device) -> None:
    for draft in random_drafts(80):
        check_candidates(device, draft)


def check_candidates(device: torch.device, draft: Draft) -> None:
    values, ids, lse = native_candidates(draft, device)
    for i, shard in enumerate(draft.logits().split(draft.shard_size, dim=1)):
        wanted_values, wanted_ids = reference.top_candidates(
            shard, draft.topk, i * draft.shard_size
        )
        assert torch.equal(values[i].cpu(), wanted_values)
        assert torch.equal(ids[i].cpu(), wanted_ids)
        exact = reference.log_sum_exp(shard).tolist()
        # A term of a mantissa p >= 0.7 is off by half a unit of 2^-22 (1.7e-7 of it), by the
        # polynomial of 2^f (0.2e-7) and by that one's float32 arithmetic (1e-7).
        assert decoded_lse(lse[i]) == pytest.approx(exact, abs=3e-7, rel=1e-15)


def test_log_sum_exp_is_as_good_as_torch_in_float32(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 4000, generator=generator) * torch.rand(64, 1, generator=generator) * 9
    lse = torch.empty(64, ops.LSE_WORDS, dtype=torch.int64, device=device)
    values, ids = torch.empty(64, 1, device=device), torch.empty(64, 1).int().to(device)
    ops.build_candidates(logits.to(device), values, ids, lse)
    exact = reference.log_sum_exp(logits)
    ours = (native_fixed_lse(lse[None]) * SCORE_UNIT - exact).abs().max()
    assert ours <= 2 * (logits.logsumexp(dim=-1).double() - exact).abs().max()
    wanted = [x / SCORE_UNIT for x in decoded_lse(lse)]
    assert native_fixed_lse(lse[None]).tolist() == pytest.approx(wanted, abs=1, rel=0)


def wanted_trees(draft: Draft, lse: Tensor, spine: bool, chain_only: Tensor) -> reference.Trees:
    """The reference's trees, from the native log-sum-exps. chain_only: [B] bool."""
    shape = (draft.batch, draft.horizon)
    values, ids = reference.top_candidates(draft.logits(), draft.topk)
    fixed = native_fixed_lse(lse).view(shape) * SCORE_UNIT
    candidates = (values.view(*shape, -1), ids.view(*shape, -1), fixed)
    return reference.build_select(*candidates, draft.num_nodes, spine, chain_only)


def check_trees(
    out: dict[str, Tensor], wanted: reference.Trees, rows: Tensor, base: Tensor
) -> None:
    """rows: [B] row of each request's tree; the other rows must still be poisoned."""
    found = {name: tensor.cpu() for name, tensor in out.items()}
    assert torch.equal(found["tokens"], wanted.tokens)
    assert torch.equal(found["scores"], wanted.scores)
    assert torch.equal(found["positions"], reference.positions(base, wanted.depths))
    unwritten = torch.ones(len(found["parents"]), dtype=torch.bool).index_fill(0, rows, False)
    for name in ("parents", "depths", "ancestors", "first_child", "next_sibling"):
        assert torch.equal(found[name][rows], getattr(wanted, name)), name
        assert (found[name][unwritten] == POISON).all(), name


@pytest.mark.parametrize("spine", [False, True])
@pytest.mark.parametrize("chains", [False, True])
def test_trees(device: torch.device, spine: bool, chains: bool) -> None:
    for draft in random_drafts(15 if chains else 50):
        check_build_select(device, draft, spine, chains)


def check_build_select(device: torch.device, draft: Draft, spine: bool, chains: bool) -> None:
    values, ids, lse = native_candidates(draft, device)
    generator = torch.Generator().manual_seed(draft.seed)
    num_rows = draft.batch + 2
    rows = torch.randperm(num_rows, generator=generator)[: draft.batch]
    chain_only = torch.rand(num_rows, generator=generator) < (0.4 if chains else 0.0)
    base = torch.randint(1 << 40, (draft.batch,), generator=generator)
    out = tree_outputs(draft.batch, num_rows, draft.num_nodes, draft.horizon, device)
    order = torch.randperm(draft.num_shards, generator=generator)  # shards may come in any
    ops.build_select(
        values[order],
        ids[order],
        lse[order],
        horizon=draft.horizon,
        spine=spine,
        chain_only=chain_only.to(device) if chains else None,
        tree_rows=rows.int().to(device),
        base=base.to(device),
        **out,
    )
    check_trees(out, wanted_trees(draft, lse, spine, chain_only[rows]), rows, base)


@pytest.mark.parametrize("spine", [False, True])
def test_both_halves_in_one_call(device: torch.device, spine: bool) -> None:
    for draft in random_drafts(15):
        check_build_ddtree(device, draft, spine)


def check_build_ddtree(device: torch.device, draft: Draft, spine: bool) -> None:
    # In one call the vocabulary is not sharded: the trees must be those of its shards all the same.
    _, _, lse = native_candidates(draft, device)
    out = tree_outputs(draft.batch, draft.batch, draft.num_nodes, draft.horizon, device)
    base = torch.arange(draft.batch)
    logits = draft.logits().to(device).view(draft.batch, draft.horizon, -1)
    ops.build_ddtree(logits, draft.topk, spine=spine, base=base.to(device), **out)
    nobody = torch.zeros(draft.batch, dtype=torch.bool)
    check_trees(out, wanted_trees(draft, lse, spine, nobody), base, base)


def random_parents(rng: random.Random) -> list[int]:
    """One request's rows, [] for none; deep trees and flat ones, some with padding."""
    num_rows = rng.choice([0, 1, rng.randint(2, 40), 256])
    num_padding = rng.choice([0, rng.randrange(num_rows)]) if num_rows else 0
    reach = rng.choice([1, 3, 256])  # how far before a node its parent may lie
    parents = [rng.randrange(max(n - reach, 0), n) for n in range(1, num_rows - num_padding)]
    return [-1, *parents, *[-1] * num_padding][:num_rows]


def test_accept(device: torch.device) -> None:
    for seed in range(150):
        check_accept(device, seed)


def check_accept(device: torch.device, seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    trees = [random_parents(rng) for _ in range(rng.randint(1, 5))]
    chains = [b for b in range(len(trees)) if rng.random() < 0.3]
    all_chains, max_path = rng.random() < 0.2, rng.randint(1, 33)
    starts = torch.tensor([0, *(len(t) for t in trees)]).cumsum(0).int()
    # Few values, so that siblings share tokens and walks get long; -1 is never accepted.
    tokens = torch.randint(-1, 2, (int(starts[-1]),), generator=generator)
    targets = torch.randint(-1, 2, (int(starts[-1]),), generator=generator)
    rows = torch.randperm(len(trees) + 1, generator=generator)[: len(trees)].int()
    parents = torch.full((len(trees) + 1, 256), POISON, dtype=torch.int32)
    for row, tree in zip(rows.tolist(), trees, strict=True):
        parents[row, : len(tree)] = torch.tensor(tree)
    rows[chains] = -1
    place = None if all_chains else (rows, parents)
    path = torch.full((len(trees), max_path), POISON, dtype=torch.int32, device=device)
    emitted = torch.full((len(trees), 41), POISON, dtype=torch.int64, device=device)
    num_emitted = torch.full((len(trees),), POISON, dtype=torch.int32, device=device)
    inputs = [t.to(device) for t in (tokens, targets, starts)]
    on_device = (None, None) if place is None else tuple(t.to(device) for t in place)
    ops.tree_accept(*inputs, *on_device, path, emitted, num_emitted)
    wanted = reference.tree_accept(
        tokens, targets, starts, max_path, 41, *((None, None) if place is None else place)
    )
    for found, want in zip((path, emitted, num_emitted), wanted, strict=True):
        assert torch.equal(found.cpu(), want)


def random_paths(num_rows: list[int], max_path: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ascending paths through each request's rows: path [B, A] and num_emitted [B], int32."""
    generator = torch.Generator().manual_seed(seed)
    path = torch.zeros(len(num_rows), max_path, dtype=torch.int32)
    num_emitted = torch.zeros(len(num_rows), dtype=torch.int32)
    for b, rows in enumerate(num_rows):
        if rows == 0:
            continue
        count = int(torch.randint(1, min(rows, max_path) + 1, (1,), generator=generator))
        nodes = (1 + torch.randperm(rows - 1, generator=generator)[: count - 1]).sort().values
        path[b, 1:count] = nodes
        path[b, count:] = path[b, count - 1].item()
        num_emitted[b] = count
    return path, num_emitted


@pytest.mark.parametrize("paged", [False, True])
def test_commit(device: torch.device, paged: bool) -> None:
    for seed in range(40):
        check_commit(device, paged, seed)


def check_commit(device: torch.device, paged: bool, seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_rows = [rng.choice([0, 1, rng.randint(2, 70), 256]) for _ in range(rng.randint(1, 5))]
    max_path, width = rng.randint(1, 33), rng.choice([1, 7, 576, 2100])
    dtype = rng.choice([torch.bfloat16, torch.float32, torch.uint8])
    starts = torch.tensor([0, *num_rows]).cumsum(0).int()
    num_tokens, page_size = int(starts[-1]), 16
    path, num_emitted = random_paths(num_rows, max_path, seed)
    slots = None
    shape: tuple[int, ...] = (num_tokens + 1, width)
    if paged:
        shape = (num_tokens // page_size + 2, page_size, width)
        slots = torch.randperm(shape[0] * page_size, generator=generator)[:num_tokens]
        slots[torch.rand(num_tokens, generator=generator) < 0.1] = -1
    layers = [torch.randint(256, shape, generator=generator).to(dtype) for _ in range(3)]
    # The native caches are views: a row apart from the next, pages apart too.
    wide = [torch.full((*shape[:-1], width + 3), 5, dtype=dtype, device=device) for _ in layers]
    for view, layer in zip(wide, layers, strict=True):
        view[..., :width] = layer.to(device)
    views = [view[..., :width] for view in wide]
    control = [t.to(device) for t in (starts, path, num_emitted)]
    ops.kv_commit(views, None if slots is None else slots.to(device), *control)
    reference.kv_commit(layers, slots, starts, path, num_emitted)
    for view, layer in zip(wide, layers, strict=True):
        assert torch.equal(view[..., :width].cpu(), layer)
        assert (view[..., width:] == 5).all()
