"""Attention, walk, commit and a whole step of the reference: by brute force and on a toy."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kdtree_runner.spec_decode import reference_step
from kdtree_runner.spec_decode.reference import (
    ancestor_lists,
    kv_commit,
    tree_accept,
    verify_attention,
    visibility,
)
from kdtree_runner.spec_decode.reference_step import Attend, PagedCache, ddtree_step, verify
from kdtree_runner.spec_decode.tree import path_to

bounded = settings(max_examples=60, deadline=None, derandomize=True)

# A tree with a branch at the root and one below, and a padding node.
PARENTS = torch.tensor([[-1, 0, 0, 1, 1, 4, -1]])
DEPTHS = torch.tensor([[0, 1, 1, 2, 2, 3, 1]])


@st.composite
def small_trees(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Parents, tokens and targets of one tree; few token values, so that siblings share some."""
    num_nodes = draw(st.integers(0, 12))
    num_padding = draw(st.integers(0, num_nodes))
    parents = [-1] + [draw(st.integers(0, n)) for n in range(num_nodes - num_padding)]
    parents += [-1] * num_padding
    token = st.integers(-1, 2)
    size = {"min_size": num_nodes + 1, "max_size": num_nodes + 1}
    return parents, draw(st.lists(token, **size)), draw(st.lists(token, **size))


def accepted_by_definition(parents: list[int], tokens: list[int], targets: list[int]) -> list[int]:
    """The deepest accepted node's path, node by node as the contract words it."""
    accepted = {0}
    for node in range(1, len(parents)):
        siblings = [n for n in range(1, node) if parents[n] == parents[node]]
        taken = any(n in accepted for n in siblings)
        matches = (
            parents[node] >= 0 and tokens[node] == targets[parents[node]] and tokens[node] >= 0
        )
        if parents[node] in accepted and matches and not taken:
            accepted.add(node)
    return path_to(max(accepted), parents)


@bounded
@given(st.lists(small_trees(), min_size=1, max_size=4), st.integers(2, 14))
def test_accept_walks_as_defined(
    trees: list[tuple[list[int], list[int], list[int]]], max_path: int
) -> None:
    starts = [0]
    for parents, _, _ in trees:
        starts.append(starts[-1] + len(parents))
    rows = torch.full((len(trees) + 2, 13), -7, dtype=torch.int32)  # poisoned where no tree lies
    for b, (parents, _, _) in enumerate(trees):
        rows[b + 1, : len(parents)] = torch.tensor(parents)
    path, emitted, num_emitted = tree_accept(
        torch.tensor([token for _, tokens, _ in trees for token in tokens]),
        torch.tensor([target for _, _, targets in trees for target in targets]),
        torch.tensor(starts),
        max_path,
        emitted_width=15,
        tree_rows=torch.arange(1, len(trees) + 1),
        parents=rows,
    )
    for b, (parents, tokens, targets) in enumerate(trees):
        wanted = accepted_by_definition(parents, tokens, targets)[:max_path]
        count = len(wanted)
        assert num_emitted[b] == count
        assert path[b].tolist() == wanted + wanted[-1:] * (max_path - count)
        assert emitted[b].tolist() == [targets[n] for n in wanted] + [0] * (15 - count)


def test_accept_of_chains_and_of_a_request_without_rows() -> None:
    tokens = torch.tensor([9, 4, 5, 6, 9, 4, 9])
    targets = torch.tensor([4, 5, 7, 8, 3, 1, 2])
    path, emitted, num_emitted = tree_accept(
        tokens, targets, torch.tensor([0, 4, 4, 6, 7]), max_path=3, emitted_width=4
    )
    assert num_emitted.tolist() == [3, 0, 1, 1]
    assert path.tolist() == [[0, 1, 2], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert emitted.tolist() == [[4, 5, 7, 0], [0, 0, 0, 0], [3, 0, 0, 0], [2, 0, 0, 0]]


@pytest.mark.parametrize("paged", [True, False])
def test_commit_moves_rows_as_if_all_were_read_first(paged: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    starts = torch.tensor([0, 6, 6, 11, 15])
    path = torch.tensor([[0, 2, 4, 5], [0, 0, 0, 0], [0, 1, 2, 3], [0, 3, 3, 3]])
    num_emitted = torch.tensor([4, 0, 4, 2])
    if paged:
        slots = torch.randperm(24, generator=generator)[:15]
        slots[14] = -1  # of request 3's node 3: its move is skipped
        layers = [torch.randn(6, 4, 3, generator=generator) for _ in range(2)]
    else:
        slots = None
        layers = [torch.randn(15, 3, generator=generator) for _ in range(2)]
    before = [layer.clone().view(-1, 3) for layer in layers]
    kv_commit(layers, slots, starts, path, num_emitted)
    place = slots if slots is not None else torch.arange(15)
    for layer, old in zip(layers, before, strict=True):
        wanted = old.clone()
        for source, destination in [(2, 1), (4, 2), (5, 3)] + [(14, 12)] * (not paged):
            wanted[place[destination]] = old[place[source]]
        assert torch.equal(layer.view(-1, 3), wanted)


class Paged:
    """A latent cache [pages, page_size, W], its pages in random order, NaN where no token is."""

    def __init__(self, seq_lens: list[int], width: int, page_size: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        max_pages = -(-max(seq_lens) // page_size)
        num_pages = len(seq_lens) * max_pages + 2
        order = torch.randperm(num_pages, generator=generator)[: len(seq_lens) * max_pages]
        self.block_table = order.view(len(seq_lens), max_pages).int()
        self.cache = torch.full((num_pages, page_size, width), math.nan, dtype=torch.float64)
        self.rows = []  # of each request, in sequence
        for b, length in enumerate(seq_lens):
            rows = torch.randn(length, width, generator=generator, dtype=torch.float64)
            for i, row in enumerate(rows):
                self.cache[self.block_table[b, i // page_size], i % page_size] = row
            self.rows.append(rows)


def test_attention_equals_a_masked_softmax() -> None:
    num_tokens, base = PARENTS.shape[1], 5
    seq_lens = [base + num_tokens, base + 3, 4]  # a tree, one cut short, and a chain
    paged = Paged(seq_lens, width=6, page_size=4)
    starts = torch.tensor([0, num_tokens, num_tokens + 3, num_tokens + 7])
    q = torch.randn(int(starts[-1]) + 1, 2, 6, dtype=torch.float64)
    lists = ancestor_lists(PARENTS, DEPTHS, 3)
    out, lse = verify_attention(
        q,
        paged.cache,
        paged.block_table,
        torch.tensor(seq_lens),
        starts,
        softmax_scale=0.3,
        tree_rows=torch.tensor([1, 1, -1]),
        depths=torch.cat([torch.full_like(DEPTHS, 99), DEPTHS]),
        ancestors=torch.cat([torch.full_like(lists, 99), lists]),
        value_dim=4,
    )
    sees = [visibility(PARENTS)[0], visibility(PARENTS)[0, :3, :3], torch.ones(4, 4).tril().bool()]
    for b, rows in enumerate(paged.rows):
        mask = torch.cat([torch.ones(len(sees[b]), seq_lens[b] - len(sees[b])).bool(), sees[b]], 1)
        scores = torch.einsum("thw,sw->hts", q[starts[b] : starts[b + 1]], rows) * 0.3
        scores = scores.masked_fill(~mask, -math.inf)
        wanted = torch.einsum("hts,sv->thv", scores.softmax(-1), rows[:, :4])
        torch.testing.assert_close(out[starts[b] : starts[b + 1]], wanted, rtol=1e-12, atol=1e-12)
        wanted_lse = scores.logsumexp(-1).T
        torch.testing.assert_close(lse[starts[b] : starts[b + 1]], wanted_lse)
    assert (out[-1] == 0).all()


def test_attention_of_a_node_is_that_of_its_path_bit_for_bit() -> None:
    num_tokens, base = PARENTS.shape[1], 9
    paged = Paged([base + num_tokens], width=6, page_size=4)
    q = torch.randn(num_tokens, 2, 6, dtype=torch.float64)
    scale = 0.5
    out, lse = verify_attention(
        q,
        paged.cache,
        paged.block_table,
        torch.tensor([base + num_tokens]),
        torch.tensor([0, num_tokens]),
        scale,
        torch.tensor([0]),
        DEPTHS,
        ancestor_lists(PARENTS, DEPTHS, 3),
        value_dim=4,
    )
    for node in range(num_tokens - 1):
        path = path_to(node, PARENTS[0])
        rows = torch.cat([paged.rows[0][:base], paged.rows[0][base:][path]])
        alone = verify_attention(
            q[[node]],
            rows[None],
            torch.tensor([[0]]),
            torch.tensor([len(rows)]),
            torch.tensor([0, 1]),
            scale,
            value_dim=4,
        )
        assert torch.equal(out[node], alone[0][0])
        assert torch.equal(lse[node], alone[1][0])


class ToyModel:
    """Two layers of absorbed MLA; what a token looks like depends on its position."""

    vocab, hidden, heads, latent, width = 11, 16, 2, 8, 12

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[0] ** 0.5

        self.embedding = normal(self.vocab, self.hidden) * 4
        self.frequency = normal(1, self.hidden)
        self.to_q = [normal(self.hidden, self.heads * self.width) for _ in range(2)]
        self.to_kv = [normal(self.hidden, self.width) for _ in range(2)]
        self.to_out = [normal(self.heads * self.latent, self.hidden) for _ in range(2)]
        self.unembed = normal(self.hidden, self.vocab)

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.embedding[tokens] + torch.sin(positions[:, None] * self.frequency)
        for layer in range(2):
            q = (x @ self.to_q[layer]).view(-1, self.heads, self.width)
            out = attend(layer, q, x @ self.to_kv[layer])
            x = x + torch.tanh(out.flatten(1) @ self.to_out[layer]) * 3
        return x @ self.unembed


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


def new_cache(max_tokens: int) -> PagedCache:
    paged = Paged([max_tokens] * len(PROMPTS), ToyModel.width, page_size=4)
    layers = [torch.full_like(paged.cache, math.nan) for _ in range(2)]
    return PagedCache(layers, paged.block_table, softmax_scale=0.4, value_dim=ToyModel.latent)


def prefill(model: ToyModel, cache: PagedCache) -> tuple[Tensor, Tensor]:
    """All but the last token of each prompt. Returns the anchors and their positions, [B] int64."""
    for b, prompt in enumerate(PROMPTS):
        one = PagedCache(cache.layers, cache.block_table[b : b + 1], 0.4, ToyModel.latent)
        if prompt[:-1]:
            verify(model, torch.tensor([prompt[:-1]]), torch.tensor([0]), one)
    base = torch.tensor([len(prompt) - 1 for prompt in PROMPTS])
    return torch.tensor([prompt[-1] for prompt in PROMPTS]), base


def greedy(model: ToyModel, num_tokens: int) -> Tensor:
    """The plain greedy continuation of each prompt, one token a pass. [B, num_tokens] int64."""
    cache = new_cache(32 + num_tokens)
    anchors, base = prefill(model, cache)
    text = []
    for _ in range(num_tokens):
        anchors = verify(model, anchors[:, None], base, cache)[:, 0]
        base = base + 1
        text.append(anchors)
    return torch.stack(text, dim=1)


Drafter = Callable[[list[int]], Tensor]
"""Draft logits [B, L, V] for requests that have emitted so many tokens."""


def speculate(
    model: ToyModel, draft: Drafter, num_tokens: int, num_nodes: int, spine: bool
) -> tuple[list[list[int]], int]:
    """At least `num_tokens` tokens of each request, and the steps that took."""
    cache = new_cache(64 + num_tokens + num_nodes)
    anchors, base = prefill(model, cache)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    num_steps = 0
    while min(map(len, texts)) < num_tokens:
        logits = draft([len(t) for t in texts])
        emitted, counts = ddtree_step(model, logits, anchors, base, cache, num_nodes, 5, spine)
        for text, row, count in zip(texts, emitted.tolist(), counts.tolist(), strict=True):
            text += row[:count]
            assert not any(row[count:])
        anchors = torch.tensor([text[-1] for text in texts])
        base = base + counts
        num_steps += 1
    return [text[:num_tokens] for text in texts], num_steps


def noisy_drafter(truth: Tensor, horizon: int, strength: float, seed: int) -> Drafter:
    """Noise with the true continuation raised by `strength`: at 0 it knows nothing."""
    generator = torch.Generator().manual_seed(seed)

    def draft(emitted: list[int]) -> Tensor:
        logits = torch.randn(len(emitted), horizon, ToyModel.vocab, generator=generator)
        for b, start in enumerate(emitted):
            for d, token in enumerate(truth[b, start : start + horizon].tolist()):
                logits[b, d, token] += strength
        return logits

    return draft


@pytest.mark.parametrize("spine", [False, True])
@pytest.mark.parametrize(
    ("num_nodes", "horizon", "strength"), [(1, 1, 2.0), (6, 6, 1.0), (12, 3, 0.0), (16, 5, 2.0)]
)
def test_ddtree_emits_the_greedy_text(
    num_nodes: int, horizon: int, strength: float, spine: bool
) -> None:
    num_tokens = 24
    for seed in range(2):
        model = ToyModel(seed)
        truth = greedy(model, num_tokens + 20)
        draft = noisy_drafter(truth, horizon, strength, seed)
        texts, num_steps = speculate(model, draft, num_tokens, num_nodes, spine)
        assert texts == truth[:, :num_tokens].tolist()
        assert num_steps <= num_tokens
        if (num_nodes, strength) == (16, 2.0):
            assert num_steps < 0.6 * num_tokens, "a helpful drafter must save passes"


def positions_by_node(base: Tensor, depths: Tensor) -> Tensor:
    return base[:, None] + torch.arange(depths.shape[1])


@pytest.mark.parametrize("broken", ["kv_commit", "positions"])
def test_the_toy_notices_a_broken_step(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows left where the tree put them, or positions by node in place of depth, change the text.
    if broken == "kv_commit":
        monkeypatch.setattr(reference_step, "kv_commit", lambda *args: None)
    else:
        monkeypatch.setattr(reference_step, "positions", positions_by_node)
    model = ToyModel(0)
    truth = greedy(model, 44)
    texts, _ = speculate(model, noisy_drafter(truth, 5, 2.0, 0), 24, 16, False)
    assert texts != truth[:, :24].tolist()
