"""Candidates and trees of the reference, by brute force over every prefix."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_runner.spec_decode.reference import (
    NO_SCORE,
    SCORE_UNIT,
    Candidate,
    Node,
    Trees,
    build_select,
    fixed_point,
    log_sum_exp,
    merge_candidates,
    positions,
    select_best_first,
    spine_length,
    top_candidates,
    visibility,
)
from kdtree_runner.spec_decode.tree import check_tree, path_to

Prefix = tuple[int, ...]
bounded = settings(max_examples=60, deadline=None, derandomize=True)


def random_candidates(
    horizon: int, topk: int, seed: int, levels: int | None = None
) -> list[list[Candidate]]:
    """Candidates of random distributions. levels: draw logits from that many values, for ties."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(horizon, topk + 3, generator=generator) * 2
    if levels is not None:
        logits = torch.randint(levels, logits.shape, generator=generator).float()
    values, ids = top_candidates(logits, topk)
    pairs = zip(values.tolist(), ids.tolist(), log_sum_exp(logits).tolist(), strict=True)
    return [
        [Candidate(fixed_point(x) - fixed_point(lse), i) for x, i in zip(row, row_ids, strict=True)]
        for row, row_ids, lse in pairs
    ]


def all_prefixes(candidates: Sequence[Sequence[Candidate]]) -> dict[Prefix, int]:
    """The score of every prefix there is."""
    scores = {}
    for depth in range(1, len(candidates) + 1):
        for path in itertools.product(*candidates[:depth]):
            scores[tuple(c.token for c in path)] = sum(c.log_prob for c in path)
    return scores


def prefixes_of(nodes: Sequence[Node]) -> list[Prefix]:
    """The tokens on the way to each node, in node order."""
    prefixes: list[Prefix] = [()]
    for node in nodes:
        prefixes.append((*prefixes[node.parent], node.token))
    return prefixes[1:]


def rescanned(candidates: Sequence[Sequence[Candidate]], num_nodes: int) -> list[Prefix]:
    """Best-first by looking at every prefix for every node: score, then parent node, then token.

    Here equal scores of siblings mean equal logits, of which the lower token is the better.
    """
    scores, order = all_prefixes(candidates), {(): 0}
    for _ in range(num_nodes):
        open_prefixes = [p for p in scores if p not in order and p[:-1] in order]
        if not open_prefixes:
            break
        best = min(open_prefixes, key=lambda p: (-scores[p], order[p[:-1]], p[-1]))
        order[best] = len(order)
    return list(order)[1:]


def test_log_sum_exp() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[0.0, 1.0, 2.0], [nan, 1.0, -inf], [-inf, nan, -inf]])
    wanted = [math.log(1 + math.e + math.e**2), 1.0, -inf]
    assert log_sum_exp(logits).tolist() == pytest.approx(wanted, rel=1e-15)


def test_top_candidates_ties_nan_and_short_rows() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[1.0, 3.0, nan, 3.0, -inf], [0.0, -0.0, 0.0, nan, -inf]])
    values, ids = top_candidates(logits, 4, vocab_offset=100)
    assert values.tolist() == [[3.0, 3.0, 1.0, -inf], [0.0, 0.0, 0.0, -inf]]
    assert ids.tolist() == [[101, 103, 100, -1], [100, 101, 102, -1]]
    values, ids = top_candidates(logits, 7)
    assert ids.tolist() == [[1, 3, 0, -1, -1, -1, -1], [0, 1, 2, -1, -1, -1, -1]]


@bounded
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 4), st.integers(1, 40))
def test_candidates_do_not_depend_on_the_sharding(
    seed: int, topk: int, num_shards: int, shard_size: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(6, (5, num_shards * shard_size), generator=generator).float()
    logits[logits == 0] = -math.inf
    whole = top_candidates(logits, topk)
    for row, values, ids in zip(logits.tolist(), *(t.tolist() for t in whole), strict=True):
        best = sorted((-x, i) for i, x in enumerate(row) if x > -math.inf)[:topk]
        best += [(math.inf, -1)] * (topk - len(best))
        assert list(zip((-x for x in values), ids, strict=True)) == best
    shards = [
        top_candidates(shard, topk, i * shard_size)
        for i, shard in enumerate(logits.split(shard_size, dim=1))
    ]
    merged = merge_candidates(*(torch.stack(t) for t in zip(*shards, strict=True)))
    assert torch.equal(merged[0], whole[0])
    assert torch.equal(merged[1], whole[1])


@pytest.mark.parametrize(("horizon", "topk"), [(1, 6), (2, 5), (3, 4), (4, 3), (5, 2)])
def test_best_first_takes_the_most_probable_prefixes_in_order(horizon: int, topk: int) -> None:
    for seed in range(8):
        candidates = random_candidates(horizon, topk, seed)
        scores = all_prefixes(candidates)
        assert len(set(scores.values())) == len(scores), "this test wants no ties"
        ranked = sorted(scores, key=lambda p: -scores[p])
        for num_nodes in range(1, len(scores) + 3):
            nodes = select_best_first(candidates, num_nodes)
            assert prefixes_of(nodes) == ranked[:num_nodes]
            assert [n.score for n in nodes] == [scores[p] for p in ranked[:num_nodes]]
            assert [n.depth for n in nodes] == [len(p) for p in ranked[:num_nodes]]


@pytest.mark.parametrize(("horizon", "topk", "num_nodes"), [(3, 2, 5), (2, 3, 4), (3, 2, 3)])
@pytest.mark.parametrize("levels", [None, 3])
def test_no_prefix_closed_set_is_more_probable(
    horizon: int, topk: int, num_nodes: int, levels: int | None
) -> None:
    for seed in range(4):
        candidates = random_candidates(horizon, topk, seed, levels)
        scores = all_prefixes(candidates)
        probability = {p: math.exp(s * SCORE_UNIT) for p, s in scores.items()}
        best = max(
            sum(probability[p] for p in chosen)
            for chosen in itertools.combinations(scores, num_nodes)
            if all(p[:-1] == () or p[:-1] in chosen for p in chosen)
        )
        taken = prefixes_of(select_best_first(candidates, num_nodes))
        assert sum(probability[p] for p in taken) == pytest.approx(best, rel=1e-12)


@bounded
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 30), st.integers(1, 4), st.integers(0, 999)
)
def test_ties_go_to_the_lower_parent_then_the_lower_token(
    horizon: int, topk: int, num_nodes: int, levels: int, seed: int
) -> None:
    candidates = random_candidates(horizon, topk, seed, levels)
    nodes = select_best_first(candidates, num_nodes)
    assert prefixes_of(nodes) == rescanned(candidates, num_nodes)
    best = sorted(all_prefixes(candidates).values(), reverse=True)[:num_nodes]
    assert [n.score for n in nodes] == best


def test_a_tie_of_two_parents_by_hand() -> None:
    candidates = [[Candidate(-1, 8), Candidate(-2, 9)], [Candidate(-1, 5), Candidate(-2, 3)]]
    # (8, 5) and (9,) tie at -2: the root is the lower parent. (8, 3) and (9, 5) tie at -3: node 1.
    assert prefixes_of(select_best_first(candidates, 6)) == [
        (8,),
        (9,),
        (8, 5),
        (8, 3),
        (9, 5),
        (9, 3),
    ]


@bounded
@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 30), st.integers(1, 6), st.integers(0, 999)
)
def test_spine_is_kept_and_the_rest_is_best_first(
    horizon: int, topk: int, num_nodes: int, levels: int, seed: int
) -> None:
    candidates = random_candidates(horizon, topk, seed, levels)
    num_spine = spine_length(candidates, num_nodes)
    assert num_spine == min(horizon, num_nodes)
    taken = prefixes_of(select_best_first(candidates, num_nodes, num_spine))
    best = tuple(position[0].token for position in candidates)
    spine = [best[: d + 1] for d in range(num_spine)]
    # The longest run of best-first nodes that leaves room for the spine, then what it lacks of it.
    order = prefixes_of(select_best_first(candidates, len(all_prefixes(candidates))))
    room = max(n for n in range(len(order) + 1) if len({*order[:n], *spine}) <= num_nodes)
    wanted = order[:room] + [p for p in spine if p not in order[:room]]
    assert taken == wanted


def test_spine_of_a_flat_distribution_by_hand() -> None:
    flat = [[Candidate(-10, 1), Candidate(-10, 2), Candidate(-10, 3)]] * 3
    assert prefixes_of(select_best_first(flat, 4)) == [(1,), (2,), (3,), (1, 1)]
    assert prefixes_of(select_best_first(flat, 4, 3)) == [(1,), (2,), (1, 1), (1, 1, 1)]
    assert prefixes_of(select_best_first(flat, 2, 2)) == [(1,), (1, 1)]
    forced = select_best_first(flat, 4, 3)
    assert [n.score for n in forced] == [-10, -10, -20, -30]


def selected(
    batch: int, horizon: int, topk: int, vocab_size: int, num_nodes: int, **options: object
) -> Trees:
    generator = torch.Generator().manual_seed(batch + horizon * 100 + topk)
    logits = torch.randn(batch * horizon, vocab_size, generator=generator)
    values, ids = top_candidates(logits, topk)
    shape = (batch, horizon, topk)
    lse = log_sum_exp(logits).view(batch, horizon)
    return build_select(values.view(shape), ids.view(shape), lse, num_nodes, **options)


@pytest.mark.parametrize("spine", [False, True])
@pytest.mark.parametrize(
    ("horizon", "topk", "vocab_size", "num_nodes"),
    [
        (1, 1, 1, 1),
        (7, 16, 50, 16),
        (3, 2, 9, 255),
        (32, 64, 70, 255),
        (7, 4, 50, 3),
        (5, 8, 2, 40),
    ],
)
def test_packed_trees_hold_their_invariants(
    horizon: int, topk: int, vocab_size: int, num_nodes: int, spine: bool
) -> None:
    chain_only = torch.tensor([False, True])
    trees = selected(2, horizon, topk, vocab_size, num_nodes, spine=spine, chain_only=chain_only)
    base = torch.tensor([10, 70])
    placed = positions(base, trees.depths)
    sees = visibility(trees.parents)
    for b in range(2):
        parents = trees.parents[b].tolist()
        check_tree(trees.parents[b], trees.depths[b], trees.ancestors[b], num_nodes)
        assert placed[b].tolist() == [base[b] + d for d in trees.depths[b].tolist()]
        for node, parent in enumerate(parents):
            path = trees.ancestors[b, node]
            assert sees[b, node].nonzero().flatten().tolist() == path[path >= 0].tolist()
            children = [n for n, p in enumerate(parents) if p == node]
            siblings = [n for n, p in enumerate(parents) if p == parent and n > node and p >= 0]
            assert trees.first_child[b, node] == (children[0] if children else -1)
            assert trees.next_sibling[b, node] == (siblings[0] if siblings else -1)
            if node and parent < 0:
                assert (trees.tokens[b, node - 1], trees.scores[b, node - 1]) == (0, NO_SCORE)
    num_real = (trees.parents[0] >= 0).sum()
    width = min(topk, vocab_size)
    assert num_real == min(num_nodes, sum(width**d for d in range(1, horizon + 1)))
    length = min(horizon, num_nodes)
    assert trees.parents[1].tolist() == [
        *range(-1, length),
        *[-1] * (num_nodes - length),
    ]


def test_selection_stops_at_a_position_without_candidates() -> None:
    logits = torch.zeros(3, 4)
    logits[1] = -math.inf
    logits[0, 2:] = -math.inf
    values, ids = (t[None] for t in top_candidates(logits, 4))
    for spine in (False, True):
        trees = build_select(values, ids, log_sum_exp(logits)[None], 5, spine)
        assert trees.parents.tolist() == [[-1, 0, 0, -1, -1, -1]]
        assert trees.tokens.tolist() == [[0, 1, 0, 0, 0]]


def test_equal_scores_of_unequal_logits_go_by_logit() -> None:
    # Both logits round to 0 units of 2^-32, and token 3 has the lower id.
    values, ids = torch.tensor([[[2e-11, 1e-11]]]), torch.tensor([[[8, 3]]], dtype=torch.int32)
    trees = build_select(values, ids, torch.ones(1, 1, dtype=torch.float64), 2)
    assert trees.tokens.tolist() == [[8, 3]]
    assert trees.scores[0, 0] == trees.scores[0, 1] == -(2**32)


def test_extreme_logits_are_clamped_and_log_probabilities_at_most_0() -> None:
    logits = torch.tensor([[3e38, -3e38, -math.inf]])
    assert log_sum_exp(logits).tolist() == [2.0**20]
    values, ids = (t[None] for t in top_candidates(logits, 3))
    trees = build_select(values, ids, log_sum_exp(logits)[None], 3)
    assert trees.scores.tolist() == [[0, -(2**53), NO_SCORE]]
    rounded_down = log_sum_exp(logits)[None] - 1.0
    assert build_select(values, ids, rounded_down, 1).scores.tolist() == [[0]]


def test_scores_round_logit_and_log_sum_exp_apart() -> None:
    values, ids = torch.tensor([[[0.3]]]), torch.zeros(1, 1, 1, dtype=torch.int32)
    lse = torch.tensor([[0.7]], dtype=torch.float64)
    trees = build_select(values, ids, lse, 1)
    logit = torch.tensor(0.3).item()  # as float32 holds it
    assert trees.scores.tolist() == [[round(logit * 2**32) - round(0.7 * 2**32)]]
    assert [fixed_point(n * SCORE_UNIT / 2) for n in (1, 3, -1)] == [0, 2, 0]


def test_every_prefix_of_the_node_order_is_the_tree_of_a_smaller_budget() -> None:
    whole = selected(2, 5, 8, 40, 60)
    for num_nodes in (1, 7, 59):
        part = selected(2, 5, 8, 40, num_nodes)
        assert torch.equal(part.parents, whole.parents[:, : num_nodes + 1])
        assert torch.equal(part.tokens, whole.tokens[:, :num_nodes])


def test_visibility_of_padding_and_path_to_agree() -> None:
    parents = torch.tensor([[-1, 0, 1, 0, 2, -1]])
    sees = visibility(parents)[0]
    for node in range(5):
        assert sees[node].nonzero().flatten().tolist() == path_to(node, parents[0])
    assert sees[5].tolist() == [True, False, False, False, False, True]
