"""Steps of build -> verify -> accept -> commit on the GPU, with no look from the host between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kdtree_runner import ops

from .conftest import assert_equal

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


# ---- with verify_attn: steps that go on from one another -----------------------------------------

VOCAB, HEADS, VERIFY_PAGE = 4096, 8, 64


class Engine:
    """Requests that are decoded step by step, every step one graph: nothing is read in between.

    Stands for a target: a token at a position has one cache row and one query a layer, whatever
    tree it came in, and the token that follows a node hangs on what verify_attn gave it.
    """

    def __init__(
        self, batch: int, num_nodes: int, layers: int, prefix: int, dtype: torch.dtype, device: str
    ) -> None:
        self.batch, self.num_tokens, self.device = batch, num_nodes + 1, device
        # What the CPU computes with is float32.
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        cache_dtype = dtype if dtype.itemsize == 1 else self.dtype

        def full(*shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape).to(device, self.dtype)

        int32 = torch.int32
        self.logits = full(batch, HORIZON, VOCAB, dtype=torch.bfloat16)
        self.tree = {
            "tokens": full(batch, num_nodes),
            "parents": full(batch, self.num_tokens, dtype=int32),
            "depths": full(batch, self.num_tokens, dtype=int32),
            "ancestors": full(batch, self.num_tokens, HORIZON + 1, dtype=int32),
            "positions": full(batch, self.num_tokens),
            "first_child": full(batch, self.num_tokens, dtype=int32),
            "next_sibling": full(batch, self.num_tokens, dtype=int32),
        }
        self.base = full(batch, value=prefix) + torch.arange(batch, device=device) * 37
        self.tokens = full(batch, self.num_tokens, value=1)  # the root, then the drafts
        self.start = torch.arange(batch + 1, dtype=int32, device=device) * self.num_tokens
        self.rows = torch.arange(batch, dtype=int32, device=device).flip(0).contiguous()
        self.path = full(batch, HORIZON + 1, dtype=int32)
        self.emitted = full(batch, HORIZON + 1)
        self.num_emitted = full(batch, dtype=int32)
        self.slots = full(batch * self.num_tokens)
        self.q = normal(layers, batch * self.num_tokens, HEADS, 576)
        self.out = normal(layers, batch * self.num_tokens, HEADS, 512)
        self.hidden = normal(batch * self.num_tokens, 96)
        pages = (prefix + 37 * batch + 8 * self.num_tokens) // VERIFY_PAGE + 1
        self.table = torch.randperm(batch * pages).int().view(batch, pages).to(device)
        shape = (batch * pages, VERIFY_PAGE, 576)
        self.caches = [normal(*shape).to(cache_dtype) for _ in range(layers)]
        self.all_rows = normal(layers, 997, 576).to(cache_dtype)
        self.all_queries = normal(layers, 991, HEADS, 576)
        most = (batch * (HORIZON + 1), HEADS, 576)  # of the decodes that check a step
        sizes = [
            ops.verify_attn_workspace(q, self.caches[0], table, self.num_tokens)
            for q, table in (
                (self.q[0], self.table),
                (torch.empty(most, dtype=self.dtype, device=device), self.table.repeat(8, 1)),
            )
        ]
        self.plan = full(sizes[0], dtype=torch.uint8)  # the workspace of all layers
        self.workspace = full(max(sizes), dtype=torch.uint8)

    def slots_of(self, positions: Tensor) -> Tensor:
        """[B, n] cache slots of these positions of each request."""
        pages = self.table.long().gather(1, positions // VERIFY_PAGE)
        return pages * VERIFY_PAGE + positions % VERIFY_PAGE

    def verify(
        self,
        layer: int,
        q: Tensor,
        out: Tensor,
        *requests: Tensor | int | None,
        workspace: Tensor | None = None,
    ) -> None:
        """workspace: with the plan of these requests; else the call plans for itself."""
        arguments = (q, self.caches[layer], *requests, 576**-0.5, 1.0, out, None)
        planned = workspace is not None
        ops.verify_attn(*arguments, self.workspace if workspace is None else workspace, planned)

    def step(self) -> None:
        tree = self.tree
        in_rows = {k: v for k, v in tree.items() if k not in ("tokens", "positions")}
        ops.build_ddtree(
            self.logits, TOPK, spine=False, tree_rows=self.rows, base=self.base, **tree
        )
        by_request = {name: value[self.rows.long()] for name, value in in_rows.items()}
        self.tokens[:, 1:] = tree["tokens"]
        where = self.base[:, None] + torch.arange(self.num_tokens, device=self.device)
        self.slots.copy_(self.slots_of(where).flatten())
        what = (self.tokens * 31 + tree["positions"]).flatten()
        lens = (self.base + self.num_tokens).int()
        bits = torch.uint8 if self.caches[0].element_size() == 1 else self.caches[0].dtype
        ops.verify_attn_plan(
            self.batch * self.num_tokens,
            HEADS,
            self.dtype,
            self.caches[0].dtype,
            VERIFY_PAGE,
            *(self.table, lens, self.start, self.num_tokens),
            *(self.rows, tree["depths"], tree["ancestors"]),
            self.plan,
        )
        for layer, cache in enumerate(self.caches):
            rows = self.all_rows[layer].view(bits)[what % 997]
            cache.view(bits).flatten(0, 1).index_copy_(0, self.slots, rows)
            self.q[layer] = self.all_queries[layer][what % 991]
            self.verify(
                layer,
                self.q[layer],
                self.out[layer],
                *(self.table, lens, self.start, self.num_tokens),
                *(self.rows, tree["depths"], tree["ancestors"]),
                workspace=self.plan,
            )
        self.hidden.copy_(self.out[-1].flatten(1)[:, :96])
        targets = self.targets(by_request)
        ops.tree_accept(
            self.tokens.flatten(),
            targets.flatten(),
            self.start,
            self.rows,
            tree["parents"],
            self.path,
            self.emitted,
            self.num_emitted,
        )
        ops.kv_commit(self.caches, self.slots, self.start, self.path, self.num_emitted)
        ops.kv_commit([self.hidden], None, self.start, self.path, self.num_emitted)
        self.base += self.num_emitted
        last = self.num_emitted.long()[:, None] - 1
        self.tokens[:, :1] = self.emitted.gather(1, last)

    def targets(self, tree: dict[str, Tensor]) -> Tensor:
        """[B, T], the token of one of a node's children, by what verify_attn gave the node."""
        size = self.out[-1].float().abs().sum((1, 2)).view(self.batch, -1)
        child = tree["first_child"].long()
        sibling = tree["next_sibling"].long().gather(1, child.clamp(min=0))
        child = torch.where(((size * 64).long() % 3 > 0) & (sibling >= 0), sibling, child)
        chosen = self.tokens.gather(1, child.clamp(min=0))
        return torch.where(child >= 0, chosen, (size * 16).long() % VOCAB)


def check_step(engine: Engine, base: Tensor, out: Tensor, tokens: Tensor) -> tuple[int, int]:
    """A step that began at `base` left what plain decodes of its tokens would have left.

    out: what verify_attn gave. tokens: [B, T] of the step. Returns how many drafts were accepted,
    and how many of them moved.
    """
    accepted = moved = 0
    device, width = engine.device, engine.num_tokens
    for b in range(engine.batch):
        count, first = int(engine.num_emitted[b]), int(base[b])
        path = engine.path[b, :count].long()
        accepted += count - 1
        moved += int((path != torch.arange(count, device=device)).sum())
        nodes = b * width + path
        where = first + torch.arange(count, device=device)
        slots = engine.slots_of(where.expand(engine.batch, -1))[b]
        what = tokens[b][path] * 31 + where
        lens = (where + 1).int()
        start = torch.arange(count + 1, dtype=torch.int32, device=device)
        table = engine.table[b].expand(count, -1).contiguous()
        chain_start = torch.tensor([0, count], dtype=torch.int32, device=device)
        for layer, cache in enumerate(engine.caches):
            name = f"request {b}, layer {layer}"
            rows = cache.flatten(0, 1)[slots]
            assert_equal(rows, engine.all_rows[layer][what % 997].cpu(), f"rows, {name}")
            q, want = engine.all_queries[layer][what % 991], out[layer][nodes].cpu()
            decoded = torch.empty_like(out[layer][nodes])
            engine.verify(layer, q, decoded, table, lens, start, 1, None, None, None)
            assert_equal(decoded, want, f"decodes, {name}")
            chain = (table[:1], lens[-1:].contiguous(), chain_start, count)
            engine.verify(layer, q, decoded, *chain, None, None, None)
            assert_equal(decoded, want, f"chain, {name}")
        kept = engine.hidden[b * width : b * width + count]
        assert_equal(kept, out[-1][nodes].flatten(1)[:, :96].cpu(), f"hidden states, request {b}")
    return accepted, moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "batch, num_nodes, layers, prefix", [(1, 16, 3, 100), (5, 8, 2, 2040), (2, 64, 1, 0)]
)
def test_verify_then_commit(
    batch: int,
    num_nodes: int,
    layers: int,
    prefix: int,
    dtype: torch.dtype,
    replayed: Callable[[Callable[[], None]], Callable[[], None]],
) -> None:
    """build, plan, verify, accept, commit in one graph, five steps in a row: each gives the bits of
    plain decodes of the path it took, on the cache that it left."""
    if not has_verify():
        pytest.skip("the library has no verify_attn for CUDA")
    run_engine(Engine(batch, num_nodes, layers, prefix, dtype, "cuda"), replayed)


def run_engine(
    engine: Engine, replayed: Callable[[Callable[[], None]], Callable[[], None]]
) -> None:
    state = (engine.base, engine.tokens, *engine.caches)
    before = [tensor.clone() for tensor in state]
    replay = replayed(engine.step)
    for tensor, value in zip(state, before, strict=True):  # the capture ran it once
        tensor.copy_(value)
    accepted = moved = 0
    for _ in range(5):
        engine.logits.copy_(torch.randn(engine.logits.shape) * 4)
        base, root = engine.base.clone(), engine.tokens[:, :1].clone()
        replay()
        tokens = torch.cat((root, engine.tree["tokens"]), 1)
        counts = check_step(engine, base, engine.out.clone(), tokens)
        accepted, moved = accepted + counts[0], moved + counts[1]
        assert torch.equal(engine.base, base + engine.num_emitted)
    assert accepted > 0, "no draft was accepted: the test says nothing about commits"
    assert moved > 0, "every path was the first nodes: the test says nothing about moves"
