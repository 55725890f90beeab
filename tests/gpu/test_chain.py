"""Steps of build -> verify -> accept -> commit on the GPU, with no look from the host between."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kdtree_runner import ops

from .conftest import assert_equal, to_cuda

pytestmark = pytest.mark.gpu

HORIZON, TOPK, PAGE = 7, 16, 16


def has_verify() -> bool:
    """Whether the library has verify_attn for CUDA."""
    q = torch.zeros(1, 8, 576, dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros(1, PAGE, 576, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    return ops.verify_attn_workspace(q, cache, table, 1) > 0


class Step:
    """The buffers of one step on one device, made once; run() fills them."""

    def __init__(self, batch: int, num_nodes: int, vocab: int, layers: int, device: str) -> None:
        num_tokens = num_nodes + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.logits = zeros(batch, HORIZON, vocab, dtype=torch.bfloat16)
        self.choices = zeros(batch * num_tokens, dtype=torch.int64)  # the target's, if it has no q
        self.tree = {
            "tokens": zeros(batch, num_nodes, dtype=torch.int64),
            "parents": zeros(batch, num_tokens),
            "depths": zeros(batch, num_tokens),
            "ancestors": zeros(batch, num_tokens, HORIZON + 1),
            "positions": zeros(batch, num_tokens, dtype=torch.int64),
        }
        self.base = zeros(batch, dtype=torch.int64)
        self.verify_tokens = zeros(batch, num_tokens, dtype=torch.int64)
        self.start = (zeros(batch + 1) + num_tokens).cumsum(0).int() - num_tokens
        self.rows = zeros(batch) + torch.arange(batch, device=device, dtype=torch.int32)
        self.path = zeros(batch, HORIZON + 1)
        self.emitted = zeros(batch, HORIZON + 1, dtype=torch.int64)
        self.num_emitted = zeros(batch)
        pages = batch * num_tokens // PAGE + 2
        self.caches = [zeros(pages, PAGE, 576, dtype=torch.bfloat16) for _ in range(layers)]
        self.slots = zeros(batch * num_tokens, dtype=torch.int64)

    def run(self) -> None:
        ops.build_ddtree(
            self.logits, TOPK, spine=True, tree_rows=self.rows, base=self.base, **self.tree
        )
        self.verify_tokens[:, 1:] = self.tree["tokens"]
        # Stands for the target: a choice for every node that hangs on the tree just built.
        agree = (self.choices + self.tree["depths"].flatten()) % 3 != 0
        next_best = self.tree["tokens"].gather(
            1, self.tree["depths"].long().clamp(max=self.tree["tokens"].shape[1] - 1)
        )
        targets = torch.where(agree, next_best.flatten(), self.choices)
        ops.tree_accept(
            self.verify_tokens.flatten(),
            targets,
            self.start,
            self.rows,
            self.tree["parents"],
            self.path,
            self.emitted,
            self.num_emitted,
        )
        ops.kv_commit(self.caches, self.slots, self.start, self.path, self.num_emitted)

    def results(self) -> dict[str, Tensor]:
        return {
            **self.tree,
            "path": self.path,
            "emitted": self.emitted,
            "num_emitted": self.num_emitted,
            **{f"cache {i}": cache for i, cache in enumerate(self.caches)},
        }


def fill(on_cpu: Step, on_gpu: Step) -> None:
    """The same fresh random inputs for both."""
    vocab = on_cpu.logits.shape[-1]
    on_cpu.logits.copy_(torch.randn(on_cpu.logits.shape) * 3)
    on_cpu.choices.copy_(torch.randint(0, vocab, on_cpu.choices.shape))
    on_cpu.base.copy_(torch.randint(0, 10000, on_cpu.base.shape))
    on_cpu.slots.copy_(torch.randperm(on_cpu.caches[0].shape[0] * PAGE)[: on_cpu.slots.numel()])
    for cache in on_cpu.caches:
        cache.copy_(torch.randn(cache.shape))
    for name in ("logits", "choices", "base", "slots"):
        getattr(on_gpu, name).copy_(getattr(on_cpu, name))
    for got, cache in zip(on_gpu.caches, on_cpu.caches, strict=True):
        got.copy_(cache)


@pytest.mark.parametrize("batch, num_nodes, vocab, layers", [(1, 16, 20480, 61), (8, 33, 300, 4)])
def test_steps(
    batch: int,
    num_nodes: int,
    vocab: int,
    layers: int,
    replayed: Callable[[Callable[[], None]], Callable[[], None]],
) -> None:
    on_cpu = Step(batch, num_nodes, vocab, layers, "cpu")
    on_gpu = Step(batch, num_nodes, vocab, layers, "cuda")
    replay = replayed(on_gpu.run)
    accepted = 0
    for run in (on_gpu.run, replay, replay, replay):
        fill(on_cpu, on_gpu)
        on_cpu.run()
        run()
        for name, want in on_cpu.results().items():
            assert_equal(on_gpu.results()[name], want, name)
        accepted += int((on_cpu.num_emitted - 1).sum())
    assert accepted > 0, "no draft was accepted: the test says nothing about commits"


def test_verify_then_commit() -> None:
    """A committed path gives the bits of plain decodes of its tokens."""
    if not has_verify():
        pytest.skip("the library has no verify_attn for CUDA")
    num_nodes, heads, prefix = 16, 8, 100
    step = Step(1, num_nodes, 4096, 1, "cuda")
    source = Step(1, num_nodes, 4096, 1, "cpu")
    fill(source, step)
    pages = (prefix + num_nodes + 1) // PAGE + 1
    cache = to_cuda(torch.randn(pages, PAGE, 576).bfloat16())
    table = torch.arange(pages, dtype=torch.int32, device="cuda").view(1, -1)
    step.caches = [cache]
    step.slots.copy_(torch.arange(num_nodes + 1) + prefix)
    q = to_cuda(torch.randn(num_nodes + 1, heads, 576).bfloat16())
    seq_lens = torch.tensor([prefix + num_nodes + 1], dtype=torch.int32, device="cuda")
    out = torch.empty(num_nodes + 1, heads, 512, dtype=torch.bfloat16, device="cuda")

    def verify(queries: Tensor, lens: Tensor, start: Tensor, rows: Tensor | None) -> Tensor:
        result = out[: len(queries)].clone()
        size = ops.verify_attn_workspace(queries, cache, table, len(queries))
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        depths, ancestors = step.tree["depths"], step.tree["ancestors"]
        tree = (rows, depths, ancestors) if rows is not None else (None, None, None)
        arguments = (queries, cache, table, lens, start, len(queries), *tree, 0.1, 1.0)
        ops.verify_attn(*arguments, result, workspace=workspace)
        return result

    ops.build_ddtree(
        step.logits, TOPK, spine=True, tree_rows=step.rows, base=step.base, **step.tree
    )
    whole = verify(q, seq_lens, step.start, step.rows)
    # The target follows the deepest node's path.
    parents = step.tree["parents"][0].tolist()
    node = max(range(num_nodes + 1), key=lambda n: int(step.tree["depths"][0, n]))
    path = [node]
    while path[-1] > 0:
        path.append(parents[path[-1]])
    path.reverse()
    step.verify_tokens[:, 1:] = step.tree["tokens"]
    targets = torch.zeros(num_nodes + 1, dtype=torch.int64, device="cuda")
    for parent, child in pairwise(path):
        targets[parent] = step.verify_tokens[0, child]
    ops.tree_accept(
        step.verify_tokens.flatten(),
        targets,
        step.start,
        step.rows,
        step.tree["parents"],
        step.path,
        step.emitted,
        step.num_emitted,
    )
    ops.kv_commit([cache], step.slots, step.start, step.path, step.num_emitted)
    for depth, node in enumerate(path):
        lens = torch.tensor([prefix + depth + 1], dtype=torch.int32, device="cuda")
        one = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        plain = verify(q[node : node + 1], lens, one, None)
        assert_equal(plain[0], whole[node].cpu(), f"node {node}")
