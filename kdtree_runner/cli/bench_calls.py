"""Our operators on random data of a shape: what `kdtree bench ops` times, and what its peers take.

Everything lives on one device and is made once; `run` is the call that is timed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from kdtree_runner import ops
from kdtree_runner.cli.bench_shapes import (
    KEY_DIM,
    ROW_BYTES,
    VALUE_DIM,
    AcceptShape,
    BuildShape,
    CommitShape,
    Shape,
    VerifyShape,
)

PAGE_SIZE = 64
MAX_DEPTH = 8  # of the trees that verify_attn gets
SCALE = KEY_DIM**-0.5
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32, "fp8": torch.float8_e4m3fn}


def draw_tree(num_tokens: int, max_depth: int, rng: random.Random) -> list[list[int]]:
    """A tree drawn at random: the path from the root to each node."""
    paths = [[0]]
    while len(paths) < num_tokens:
        parent = rng.choice(paths) if rng.random() < 0.5 else paths[-1]
        if len(parent) <= max_depth:
            paths.append([*parent, len(paths)])
    return paths


def int32(values: object, device: torch.device) -> Tensor:
    """Integers on the device."""
    return torch.as_tensor(values, dtype=torch.int32).to(device)


class BuildInputs:
    """tree_build. logits: [B, L, V]."""

    def __init__(self, shape: BuildShape, device: torch.device) -> None:
        self.shape = shape
        b, rows, num_tokens = shape.batch, shape.batch * shape.horizon, shape.num_nodes + 1
        size = (b, shape.horizon, shape.vocab)
        self.logits = (3 * torch.randn(size, device=device)).to(DTYPES[shape.logits])
        self.values = torch.empty(1, rows, shape.topk, device=device)
        self.ids = torch.empty(1, rows, shape.topk, dtype=torch.int32, device=device)
        self.lse = torch.empty(1, rows, ops.LSE_WORDS, dtype=torch.int64, device=device)
        self.tree = {
            "tokens": torch.empty(b, shape.num_nodes, dtype=torch.int64, device=device),
            "parents": torch.empty(b, num_tokens, dtype=torch.int32, device=device),
            "depths": torch.empty(b, num_tokens, dtype=torch.int32, device=device),
            "ancestors": torch.empty(
                b, num_tokens, shape.horizon + 1, dtype=torch.int32, device=device
            ),
        }
        self.scores = torch.empty(b, shape.num_nodes, dtype=torch.int64, device=device)
        self.candidates()

    def candidates(self) -> None:
        """The first half."""
        rows = self.logits.flatten(0, 1)
        ops.build_candidates(rows, self.values[0], self.ids[0], self.lse[0])

    def run(self) -> None:
        if self.shape.part == "candidates":
            self.candidates()
        elif self.shape.part == "select":
            ops.build_select(
                self.values,
                self.ids,
                self.lse,
                horizon=self.shape.horizon,
                spine=False,
                chain_only=None,
                tree_rows=None,
                base=None,
                **self.tree,
            )
        else:
            ops.build_ddtree(self.logits, self.shape.topk, spine=False, **self.tree)

    def path_scores(self) -> Tensor:
        """[B, N] float64, log-probability of each node's path."""
        ops.build_ddtree(self.logits, self.shape.topk, spine=False, **self.tree, scores=self.scores)
        return self.scores.double() * 2.0**-32


class VerifyInputs:
    """verify_attn. q: [B * T, H, 576]. cache: [pages, 64, 576], every page in a random place."""

    def __init__(self, shape: VerifyShape, device: torch.device) -> None:
        self.shape = shape
        b, t, h = shape.batch, shape.num_tokens, shape.num_heads
        self.length = shape.prefix + t
        pages = -(-self.length // PAGE_SIZE)
        # What the CPU computes with is float32; a GPU, bfloat16.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        cache_dtype = DTYPES["fp8"] if shape.dtype == "fp8" else dtype
        size = (b * pages, PAGE_SIZE, KEY_DIM)
        self.cache = torch.randn(size, dtype=dtype, device=device).to(cache_dtype)
        order = torch.randperm(b * pages, device=device)
        self.table = order.int().view(b, pages)
        self.q = torch.randn(b * t, h, KEY_DIM, dtype=dtype, device=device)
        self.out = torch.empty(b * t, h, VALUE_DIM, dtype=dtype, device=device)
        self.seq_lens = int32([self.length] * b, device)
        self.start = int32(range(0, b * t + 1, t), device)
        self.rows = int32(range(b), device)
        rng = random.Random(1)
        depths = torch.zeros(b, t, dtype=torch.int32)
        ancestors = torch.full((b, t, MAX_DEPTH + 1), -1, dtype=torch.int32)
        for request in range(b):
            for node, path in enumerate(draw_tree(t, MAX_DEPTH, rng)):
                depths[request, node] = len(path) - 1
                ancestors[request, node, : len(path)] = torch.tensor(path)
        self.tree = (self.rows, depths.to(device), ancestors.to(device))
        size_of = ops.verify_attn_workspace(self.q, self.cache, self.table, t)
        self.workspace = torch.empty(size_of, dtype=torch.uint8, device=device)
        self._plan(*self.tree)

    def run(self) -> None:
        if self.shape.what == "plan + layer":
            self._plan(*self.tree)
        self._verify(*self.tree)

    def _plan(self, rows: Tensor | None, depths: Tensor | None, ancestors: Tensor | None) -> None:
        num_tokens, num_heads, _ = self.q.shape
        ops.verify_attn_plan(
            num_tokens,
            num_heads,
            self.q.dtype,
            self.cache.dtype,
            PAGE_SIZE,
            self.table,
            self.seq_lens,
            self.start,
            self.shape.num_tokens,
            rows,
            depths,
            ancestors,
            self.workspace,
        )

    def _verify(self, rows: Tensor | None, depths: Tensor | None, ancestors: Tensor | None) -> None:
        ops.verify_attn(
            self.q,
            self.cache,
            self.table,
            self.seq_lens,
            self.start,
            self.shape.num_tokens,
            rows,
            depths,
            ancestors,
            SCALE,
            1.0,
            self.out,
            workspace=self.workspace,
            planned=True,
        )

    def chain(self) -> Tensor:
        """[B * T, H, 512], what every peer must come close to: none of them takes a tree."""
        self._plan(None, None, None)
        self._verify(None, None, None)
        self._plan(*self.tree)
        return self.out


class AcceptInputs:
    """tree_accept: drawn trees; the target follows the deepest path of each."""

    def __init__(self, shape: AcceptShape | CommitShape, device: torch.device) -> None:
        self.batch, num_tokens = shape.batch, shape.num_nodes + 1
        rng = random.Random(1)
        self.paths: list[list[int]] = []
        parents = torch.full((self.batch, num_tokens), -1, dtype=torch.int32)
        tokens = torch.arange(self.batch * num_tokens).view(self.batch, num_tokens)
        targets = torch.zeros_like(tokens)
        for request in range(self.batch):
            nodes = draw_tree(num_tokens, shape.horizon, rng)
            for node, path in enumerate(nodes[1:], 1):
                parents[request, node] = path[-2]
            deepest = max(nodes, key=len)
            for parent, child in pairwise(deepest):
                targets[request, parent] = tokens[request, child]
            self.paths.append(deepest)
        self.tokens, self.targets = tokens.flatten().to(device), targets.flatten().to(device)
        self.parents = parents.to(device)
        self.start = int32(range(0, self.batch * num_tokens + 1, num_tokens), device)
        self.rows = int32(range(self.batch), device)
        self.path = torch.empty(self.batch, shape.horizon + 1, dtype=torch.int32, device=device)
        self.emitted = torch.empty_like(self.path, dtype=torch.int64)
        self.num_emitted = torch.empty(self.batch, dtype=torch.int32, device=device)

    def run(self) -> None:
        tree = (self.rows, self.parents)
        results = (self.path, self.emitted, self.num_emitted)
        ops.tree_accept(self.tokens, self.targets, self.start, *tree, *results)


class CommitInputs:
    """kv_commit: every second node of each request is on its path, or the first ones are."""

    def __init__(self, shape: CommitShape, device: torch.device) -> None:
        self.shape = shape
        num_tokens, depth = shape.num_nodes + 1, shape.horizon
        num_slots = shape.batch * num_tokens
        pages = -(-num_slots // PAGE_SIZE)
        size = (pages, PAGE_SIZE, ROW_BYTES // 2)
        self.layers = [
            torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(shape.num_layers)
        ]
        self.slots = torch.randperm(pages * PAGE_SIZE)[:num_slots].to(device)
        self.start = int32(range(0, num_slots + 1, num_tokens), device)
        step = 1 if shape.what == "identity" else 2
        self.path = int32([range(0, step * depth + 1, step)] * shape.batch, device)
        self.num_emitted = int32([depth + 1] * shape.batch, device)
        self.accept = AcceptInputs(shape, device) if shape.what == "accept + commit" else None

    def run(self) -> None:
        if self.accept is not None:
            self.accept.run()
        ops.kv_commit(self.layers, self.slots, self.start, self.path, self.num_emitted)

    def moves(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(from, to) slots of each request."""
        for request in range(self.shape.batch):
            slots = self.slots[int(self.start[request]) : int(self.start[request + 1])]
            path = self.path[request].long()
            yield slots[path[1:]], slots[1 : len(path)]


Inputs = BuildInputs | VerifyInputs | AcceptInputs | CommitInputs


def make_inputs(shape: Shape, device: torch.device) -> Inputs:
    """Random data of this shape, the same in every process."""
    torch.manual_seed(0)
    if isinstance(shape, BuildShape):
        return BuildInputs(shape, device)
    if isinstance(shape, VerifyShape):
        return VerifyInputs(shape, device)
    return (
        AcceptInputs(shape, device)
        if isinstance(shape, AcceptShape)
        else CommitInputs(shape, device)
    )
