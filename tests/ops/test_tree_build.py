"""build_select and build_ddtree against plain Python."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kdtree_runner import ops

from .candidates import candidates, expected_candidates

UNIT = 2**32  # scores are in units of 2^-32
NO_SCORE = -(2**63)


def outputs(batch: int, num_nodes: int, horizon: int, num_rows: int | None = None) -> dict:
    num_rows, num_tokens = batch if num_rows is None else num_rows, num_nodes + 1

    def filled(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, -7, dtype=dtype)

    return {
        "tokens": filled(batch, num_nodes, dtype=torch.int64),
        "parents": filled(num_rows, num_tokens),
        "depths": filled(num_rows, num_tokens),
        "ancestors": filled(num_rows, num_tokens, horizon + 1),
        "positions": filled(batch, num_tokens, dtype=torch.int64),
        "first_child": filled(num_rows, num_tokens),
        "next_sibling": filled(num_rows, num_tokens),
        "scores": filled(batch, num_nodes, dtype=torch.int64),
    }


def build(logits: Tensor, topk: int, num_nodes: int, spine: bool = False, **kwargs) -> dict:
    batch, horizon, _ = logits.shape
    out = outputs(batch, num_nodes, horizon)
    base = torch.arange(batch) * 100 + 5
    ops.build_ddtree(logits, topk, spine=spine, base=base, **out, **kwargs)
    return out


def expected_tree(
    logits: Tensor, topk: int, num_nodes: int, spine: bool = False, chain: bool = False
) -> list[tuple[int, int, int, float]]:
    """(token, parent, depth, score) of each node of one request; scores in float64."""
    best = [
        [(x - lse, token) for x, token in expected_candidates(row, topk) if token >= 0]
        for row, lse in zip(logits, torch.logsumexp(logits.double(), -1).tolist(), strict=True)
    ]
    nodes: list[tuple[int, int, int, float]] = [(0, -1, 0, 0.0)]
    ranks: list[tuple[int, ...]] = [()]
    taken = {()}
    spine_length = 0
    while spine_length < min(len(best), num_nodes) and best[spine_length]:
        spine_length += 1
    missing = spine_length if spine or chain else 0

    def take(parent: int, rank: int) -> None:
        nonlocal missing
        depth = nodes[parent][2]
        log_prob, token = best[depth][rank]
        nodes.append((token, parent, depth + 1, nodes[parent][3] + log_prob))
        ranks.append((*ranks[parent], rank))
        taken.add(ranks[-1])
        if missing and ranks[-1] == (0,) * (depth + 1):
            missing -= 1

    while len(nodes) - 1 < (0 if chain else num_nodes - missing):
        open_prefixes = [
            (-(nodes[p][3] + log_prob), p, rank)
            for p in range(len(nodes))
            if nodes[p][2] < len(best)
            for rank, (log_prob, _) in enumerate(best[nodes[p][2]])
            if (*ranks[p], rank) not in taken
        ]
        if not open_prefixes:
            break
        _, parent, rank = min(open_prefixes)
        take(parent, rank)
    while missing:
        take(ranks.index((0,) * (spine_length - missing)), 0)
    return nodes[1:]


def check_tree(out: dict, b: int, row: int, nodes: list[tuple[int, int, int, float]]) -> None:
    """Every output of request b against the nodes that are expected."""
    num_nodes, width = out["tokens"].shape[1], out["ancestors"].shape[2]
    padding = num_nodes - len(nodes)
    assert out["tokens"][b].tolist() == [n[0] for n in nodes] + [0] * padding
    parents = [-1] + [n[1] for n in nodes] + [-1] * padding
    depths = [0] + [n[2] for n in nodes] + [1] * padding
    assert out["parents"][row].tolist() == parents
    assert out["depths"][row].tolist() == depths
    assert out["positions"][b].tolist() == [b * 100 + 5 + d for d in depths]
    paths = [[0]]
    for node in range(1, num_nodes + 1):
        paths.append([*paths[max(parents[node], 0)], node])
    assert out["ancestors"][row].tolist() == [p + [-1] * (width - len(p)) for p in paths]
    children = [
        [n for n in range(1, num_nodes + 1) if parents[n] == p] for p in range(len(parents))
    ]
    assert out["first_child"][row].tolist() == [c[0] if c else -1 for c in children]
    following = {a: b for c in children for a, b in pairwise(c)}
    assert out["next_sibling"][row].tolist() == [following.get(n, -1) for n in range(len(parents))]
    scores = out["scores"][b].tolist()
    assert scores[len(nodes) :] == [NO_SCORE] * padding
    for score, node in zip(scores, nodes, strict=False):
        assert score / UNIT == pytest.approx(node[3], abs=2e-6 * node[2])


@pytest.mark.parametrize("spine", [False, True])
@pytest.mark.parametrize(
    "num_nodes, horizon, topk",
    [(1, 1, 1), (1, 7, 4), (3, 2, 2), (16, 7, 16), (31, 15, 8), (63, 3, 64)],
)
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_tree(spine: bool, num_nodes: int, horizon: int, topk: int, scale: float) -> None:
    logits = torch.randn(3, horizon, 90) * scale
    out = build(logits, topk, num_nodes, spine)
    for b in range(3):
        check_tree(out, b, b, expected_tree(logits[b], topk, num_nodes, spine))


@pytest.mark.parametrize("num_nodes", [200, 255])
def test_large_tree(num_nodes: int) -> None:
    logits = torch.randn(1, 32, 60) * 2
    check_tree(build(logits, 12, num_nodes), 0, 0, expected_tree(logits[0], 12, num_nodes))


def test_tree_of_bfloat16_logits() -> None:
    logits = (torch.randn(2, 7, 50) * 3).bfloat16()
    out = build(logits, 8, 16)
    for b in range(2):
        check_tree(out, b, b, expected_tree(logits[b], 8, 16))


def test_equal_scores_go_by_parent_then_candidate() -> None:
    out = build(torch.zeros(1, 3, 3), 3, 7)
    assert out["tokens"][0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert out["parents"][0].tolist() == [-1, 0, 0, 0, 1, 1, 1, 2]


def test_certain_drafts_give_a_chain() -> None:
    """Log-probabilities of 0: a child scores as its parent does, and comes after it."""
    logits = torch.full((1, 5, 10), -1e5)
    logits[0, torch.arange(5), [3, 1, 4, 1, 5]] = 1e5
    out = build(logits, 4, 5)
    assert out["tokens"][0].tolist() == [3, 1, 4, 1, 5]
    assert out["parents"][0].tolist() == [-1, 0, 1, 2, 3, 4]
    assert out["scores"][0].tolist() == [0] * 5


def test_padding_where_the_tree_ends() -> None:
    logits = torch.randn(1, 4, 30)
    logits[0, 2] = -torch.inf
    out = build(logits, 3, 20)
    nodes = expected_tree(logits[0, :2], 3, 20)
    assert len(nodes) == 12
    check_tree(out, 0, 0, nodes)


@pytest.mark.parametrize("num_nodes", [2, 5, 9])
def test_chain_only(num_nodes: int) -> None:
    logits = torch.randn(3, 5, 40)
    out = build(logits, 4, num_nodes, chain_only=torch.tensor([False, True, False]))
    for b in range(3):
        check_tree(out, b, b, expected_tree(logits[b], 4, num_nodes, chain=b == 1))


def test_only_the_given_rows_of_the_state_are_written() -> None:
    logits, num_nodes = torch.randn(3, 4, 40), 6
    out = outputs(3, num_nodes, 4, num_rows=5)
    ops.build_ddtree(
        logits,
        4,
        spine=False,
        base=torch.arange(3) * 100 + 5,
        tree_rows=torch.tensor([4, -1, 1], dtype=torch.int32),
        chain_only=torch.tensor([True, True, False, True, False]),
        **out,
    )
    check_tree(out, 0, 4, expected_tree(logits[0], 4, num_nodes))
    check_tree(out, 2, 1, expected_tree(logits[2], 4, num_nodes, chain=True))
    assert out["tokens"][1].tolist() == [n[0] for n in expected_tree(logits[1], 4, num_nodes)]
    for name in ("parents", "depths", "ancestors", "first_child", "next_sibling"):
        assert (out[name][[0, 2, 3]] == -7).all(), name


def test_optional_outputs_may_be_left_out() -> None:
    logits = torch.randn(2, 4, 40)
    full, some = build(logits, 4, 6), outputs(2, 6, 4)
    for name in ("positions", "first_child", "next_sibling", "scores"):
        some.pop(name)
    ops.build_ddtree(logits, 4, spine=False, **some)
    for name, got in some.items():
        assert torch.equal(got, full[name])


@pytest.mark.parametrize("cuts", [[0, 500], [0, 1, 2, 333, 500], [0, 100, 200, 300, 400, 500]])
def test_shards_give_the_tree_of_the_whole(cuts: list[int]) -> None:
    batch, horizon, topk, num_nodes = 2, 7, 8, 24
    logits = torch.randn(batch, horizon, 500) * 6
    logits[:, 3] = torch.randint(-3, 3, (batch, 500)).float()  # ties
    logits[:, 4, 120:] -= 40
    whole = build(logits, topk, num_nodes, spine=True)
    flat = logits.flatten(0, 1)
    shards = [candidates(flat[:, a:b], topk, a) for a, b in pairwise(cuts)]
    for order in (shards, shards[::-1]):
        out = outputs(batch, num_nodes, horizon)
        values, ids, lse = (torch.stack(parts) for parts in zip(*order, strict=True))
        base = torch.arange(batch) * 100 + 5
        ops.build_select(
            values,
            ids,
            lse,
            horizon=horizon,
            spine=True,
            chain_only=None,
            tree_rows=None,
            base=base,
            **out,
        )
        for name in out:
            assert torch.equal(out[name], whole[name]), name


def test_a_tree_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(9, 7, 300) * 3
    together = build(logits, 16, 16)
    for b in range(9):
        alone = build(logits[b : b + 1], 16, 16)
        for name in ("tokens", "parents", "depths", "ancestors", "scores"):
            assert torch.equal(alone[name][0], together[name][b]), name


def test_a_prefix_of_the_node_order_is_the_tree_of_that_budget() -> None:
    logits = torch.randn(1, 7, 100) * 2
    large = build(logits, 32, 32)
    small = build(logits, 32, 11)
    for name, size in (("tokens", 11), ("parents", 12), ("depths", 12), ("scores", 11)):
        assert torch.equal(small[name][0], large[name][0, :size]), name


def test_empty_batch() -> None:
    build(torch.randn(0, 7, 50), 4, 8)
    values, ids, lse = candidates(torch.randn(0, 50), 4)
    assert values.shape == ids.shape == (0, 4) and lse.shape == (0, 3)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"num_nodes": 256}, r"kdtree_build_ddtree: num_nodes must be in \[1, 255\], got 256"),
        ({"topk": 65}, r"topk must be in \[1, 64\], got 65"),
        ({"horizon": 33}, r"kdtree_build_ddtree: horizon must be in \[1, 32\], got 33"),
    ],
)
def test_errors_of_the_library(kwargs: dict, message: str) -> None:
    sizes = {"num_nodes": 8, "topk": 4, "horizon": 7} | kwargs
    with pytest.raises(ValueError, match=message):
        build(torch.randn(1, sizes["horizon"], 70), sizes["topk"], sizes["num_nodes"])


def test_errors_name_argument_wanted_and_got() -> None:
    values, ids = torch.empty(2, 4), torch.empty(2, 4, dtype=torch.int32)
    lse = torch.empty(2, 3, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"ids must be torch.int32 \[2, 4\], contiguous, got torch.int64"
    ):
        ops.build_candidates(torch.randn(2, 9), values, ids.long(), lse)
    with pytest.raises(ValueError, match=r"lse must be torch.int64 \[2, 3\].* got .*\[2, 2\]"):
        ops.build_candidates(torch.randn(2, 9), values, ids, lse[:, :2])
    with pytest.raises(ValueError, match=r"logits must be .* with contiguous rows"):
        ops.build_candidates(torch.randn(9, 2).T, values, ids, lse)
    with pytest.raises(ValueError, match=r"tree_rows\[b\] must be in \[-1, 1\], got 2"):
        build(torch.randn(2, 3, 9), 4, 5, tree_rows=torch.tensor([0, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"base must be a pointer, got NULL"):
        ops.build_ddtree(torch.randn(2, 3, 9), 4, spine=False, **outputs(2, 5, 3))


def test_opcheck() -> None:
    logits = torch.randn(6, 40)
    args = (
        logits,
        torch.empty(6, 4),
        torch.empty(6, 4, dtype=torch.int32),
        torch.empty(6, 3, dtype=torch.int64),
        0,
    )
    torch.library.opcheck(torch.ops.kdtree.build_candidates.default, args)
    ops.build_candidates(*args)
    values, ids, lse = (t.unsqueeze(0) for t in args[1:4])
    out = outputs(2, 5, 3)
    base = torch.zeros(2, dtype=torch.int64)
    chain_only = torch.tensor([True, False])
    rows = torch.arange(2, dtype=torch.int32)
    tree = {"spine": True, "chain_only": chain_only, "tree_rows": rows, "base": base, **out}
    select = torch.ops.kdtree.build_select.default
    torch.library.opcheck(select, (values, ids, lse), {"horizon": 3, **tree})
    for name in ("chain_only", "tree_rows", "base", *list(out)[4:]):
        tree[name] = None
    torch.library.opcheck(select, (values, ids, lse), {"horizon": 3, **tree})
    torch.library.opcheck(torch.ops.kdtree.build_ddtree.default, (logits.view(2, 3, 40), 4), tree)
