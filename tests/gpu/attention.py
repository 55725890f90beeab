"""Attention problems drawn on a GPU, run through verify_attn and computed in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kdtree_runner import ops

DEVICE = "cuda"
DEPTH = 16  # deepest node of a drawn tree
NAN8 = 0x7F  # e4m3


@dataclass(frozen=True)
class Tree:
    """parents: of each node, -1 at the root; None: a chain of `num_nodes`, tree row -1."""

    num_nodes: int
    parents: tuple[int, ...] | None = None

    def path(self, node: int) -> list[int]:
        if self.parents is None:
            return list(range(node + 1))
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


def draw_tree(num_nodes: int, rng: random.Random) -> Tree:
    parents, depths = [-1], [0]
    for node in range(1, num_nodes):
        while True:
            parent = rng.randrange(node) if rng.random() < 0.5 else node - 1
            if depths[parent] < DEPTH:
                break
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return Tree(num_nodes, tuple(parents))


@dataclass(frozen=True)
class Problem:
    """Requests over logical caches, rows[b]: [base + nodes, 576]; `pack` says where they lie."""

    q: list[Tensor]  # [nodes, H, 576] of each request
    rows: list[Tensor]
    bases: list[int]
    trees: list[Tree]
    kv_scale: float = 1.0

    def only(self, *requests: int) -> Problem:
        return replace(
            self,
            q=[self.q[b] for b in requests],
            rows=[self.rows[b] for b in requests],
            bases=[self.bases[b] for b in requests],
            trees=[self.trees[b] for b in requests],
        )


def draw(
    bases: list[int],
    trees: list[Tree],
    num_heads: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator)

    kv_scale = 1.0 if dtype == torch.bfloat16 else 0.37
    return Problem(
        [normal(t.num_nodes, num_heads, 576).bfloat16() for t in trees],
        [normal(base + t.num_nodes, 576).to(dtype) for base, t in zip(bases, trees, strict=True)],
        bases,
        trees,
        kv_scale,
    )


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8 if x.dtype == torch.float8_e4m3fn else torch.int16)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float8_e4m3fn:
        return torch.full(shape, NAN8, dtype=torch.uint8, device=DEVICE).view(dtype)
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def run(
    problem: Problem,
    page_size: int = 64,
    *,
    padded: int = 0,
    seed: int = 0,
    odd_strides: bool = False,
    max_pages: int = 0,
) -> tuple[Tensor, Tensor]:
    """out [tokens, H, 512] and lse of one call; what must not be read is NaN or out of range."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, dtype = problem.q[0].shape[1], problem.rows[0].dtype
    batch = len(problem.q) + padded
    lengths = [len(rows) for rows in problem.rows] + [0] * padded
    counts = [t.num_nodes for t in problem.trees] + [0] * padded
    width = max(max_pages, max(-(-n // page_size) for n in lengths))
    num_pages = sum(-(-n // page_size) for n in lengths) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    cache = poisoned(num_pages, page_size, 640 if odd_strides else 576, dtype=dtype)[..., :576]
    table = torch.full((batch, width), -(10**9), dtype=torch.int32)
    for b, rows in enumerate(problem.rows):
        for page in range(-(-len(rows) // page_size)):
            place = table[b, page] = order.pop()
            part = rows[page * page_size : (page + 1) * page_size]
            bits(cache[place])[: len(part)] = bits(part)
    tree_width = max(t.num_nodes for t in problem.trees) + 2
    depths = torch.full((batch + 1, tree_width), 10**6, dtype=torch.int32)
    ancestors = torch.full((batch + 1, tree_width, DEPTH + 1), 10**6, dtype=torch.int32)
    tree_rows = torch.full((batch,), -1, dtype=torch.int32)
    for b, tree in enumerate(problem.trees):
        if tree.parents is None:
            continue
        tree_rows[b] = batch - b
        for node in range(tree.num_nodes):
            path = tree.path(node)
            depths[batch - b, node] = len(path) - 1
            ancestors[batch - b, node, : len(path)] = torch.tensor(path)
    num_tokens = sum(counts) + 2  # two rows past the last request
    q = torch.full(
        (num_tokens, num_heads + 3, 640),
        float("nan"),
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    q = q[:, 1 : num_heads + 1, :576] if odd_strides else q[:, :num_heads, :576].contiguous()
    q[: sum(counts)] = torch.cat(problem.q)
    out = torch.full(
        (num_tokens, num_heads, 520 if odd_strides else 512),
        float("nan"),
        dtype=torch.bfloat16,
        device=DEVICE,
    )[..., :512]
    lse = torch.full((num_tokens, num_heads), float("nan"), device=DEVICE)
    device_table = table.to(DEVICE)
    size = ops.verify_attn_workspace(q, cache, device_table, max(counts))
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=DEVICE)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    requests = (
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        starts.to(DEVICE),
        max(counts),
        tree_rows.to(DEVICE),
        depths.to(DEVICE),
        ancestors.to(DEVICE),
    )
    scales = (576**-0.5, problem.kv_scale)
    ops.verify_attn(q, cache, device_table, *requests, *scales, out, lse, workspace)
    workspace.fill_(0xFF)
    ops.verify_attn_plan(
        num_tokens, num_heads, q.dtype, cache.dtype, page_size, device_table, *requests, workspace
    )
    for layer in range(2):
        again = torch.full_like(out, float("nan")), torch.full_like(lse, float("nan"))
        ops.verify_attn(q, cache, device_table, *requests, *scales, *again, workspace, planned=True)
        same = slice(sum(counts))
        assert_same(rows_of(again, same), rows_of((out, lse), same), f"layer {layer}, planned")
    assert out[sum(counts) :].isnan().all() and lse[sum(counts) :].isnan().all(), "past the end"
    return out[: sum(counts)].contiguous(), lse[: sum(counts)].contiguous()


def expected(problem: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same in torch, all arithmetic in `dtype`."""
    outs, lses = [], []
    for q, rows, base, tree in zip(
        problem.q, problem.rows, problem.bases, problem.trees, strict=True
    ):
        keys = rows.to(dtype) * problem.kv_scale
        scores = torch.einsum("thd,sd->ths", q.to(dtype), keys) * 576**-0.5
        seen = torch.zeros(tree.num_nodes, len(rows), dtype=torch.bool)
        seen[:, :base] = True
        for node in range(tree.num_nodes):
            seen[node, [base + n for n in tree.path(node)]] = True
        scores = scores.masked_fill(~seen[:, None].to(DEVICE), float("-inf"))
        outs.append(torch.einsum("ths,sd->thd", scores.softmax(-1), keys[:, :512]))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses)


def assert_close(problem: Problem, result: tuple[Tensor, Tensor]) -> float:
    """Each row's error is at most twice that of torch in bfloat16, both against float64."""
    out, lse = result
    exact, exact_lse = expected(problem, torch.float64)
    in_bf16, _ = expected(problem, torch.bfloat16)
    size = exact.norm(dim=-1)
    ours = ((out.double() - exact).norm(dim=-1) / size).max().item()
    torchs = ((in_bf16.double() - exact).norm(dim=-1) / size).max().item()
    assert ours <= 2 * torchs, f"error {ours:.2e}, torch in bfloat16 {torchs:.2e}"
    assert (lse - exact_lse).abs().max().item() < 2e-3
    return ours


def assert_same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], what: str) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.isfinite().all() and y.isfinite().all(), what
        different = (x != y).flatten(1).any(1).nonzero().flatten().tolist()
        assert not different, f"{what}: rows {different[:9]} of {len(x)} differ"


def rows_of(result: tuple[Tensor, Tensor], rows: slice | list[int]) -> tuple[Tensor, Tensor]:
    return result[0][rows], result[1][rows]
