"""Masks, depths and paths against those of an independent library for given trees."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from kdtree_runner.spec_decode.reference import (
    ancestor_lists,
    build_select,
    child_lists,
    log_sum_exp,
    top_candidates,
    visibility,
)
from kdtree_runner.spec_decode.tree import path_to

pytest.importorskip("xformers", reason="xformers is not installed")
tree_attention = pytest.importorskip(
    "xformers.ops.tree_attention",
    reason="needs xformers 0.0.35: older ones lack the module or do not import without CUDA",
    exc_type=ImportError,
)


def random_tree(num_nodes: int, max_depth: int, seed: int) -> tuple[Tensor, Tensor]:
    """Parents and depths [1, T] int32 of a tree without padding."""
    rng = random.Random(seed)
    parents, depths = [-1], [0]
    for _ in range(num_nodes):
        parent = rng.choice([n for n, depth in enumerate(depths) if depth < max_depth])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return torch.tensor([parents], dtype=torch.int32), torch.tensor([depths], dtype=torch.int32)


def selected_tree(num_nodes: int, horizon: int, seed: int, spine: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(horizon, 40, generator=generator) * 2
    values, ids = (t[None] for t in top_candidates(logits, 16))
    trees = build_select(values, ids, log_sum_exp(logits)[None], num_nodes, spine)
    return trees.parents, trees.depths


def choices_of(parents: list[int]) -> list[tuple[int, ...]]:
    """Each node but the root as the library names it: the child index taken at each level."""
    names: list[tuple[int, ...]] = [()]
    num_children: Counter[int] = Counter()
    for parent in parents[1:]:
        names.append((*names[parent], num_children[parent]))
        num_children[parent] += 1
    return names[1:]


SIZES = [(1, 1), (9, 3), (40, 32), (120, 6)]
CASES = [
    *[pytest.param(*random_tree(n, depth, n), id=f"random-{n}-{depth}") for n, depth in SIZES],
    *[
        pytest.param(*selected_tree(16, 7, 3, spine), id=f"ddtree-{spine}")
        for spine in (False, True)
    ],
    pytest.param(*selected_tree(60, 15, 4, True), id="ddtree-60"),
]


@pytest.mark.parametrize(("parents", "depths"), CASES)
def test_shape_of_a_tree_agrees_with_xformers(parents: Tensor, depths: Tensor) -> None:
    parent = parents[0].tolist()
    names = choices_of(parent)
    theirs = tree_attention.TreeAttnMetadata.from_tree_choices(names, device=torch.device("cpu"))
    # Their nodes are sorted by depth, then by name: node `theirs_of[n]` is our node n.
    ranked = sorted(names, key=lambda name: (len(name), name))
    theirs_of = torch.tensor([0] + [1 + ranked.index(name) for name in names])
    ours_of = theirs_of.argsort()

    mask = theirs.attention_bias == 0
    assert torch.equal(visibility(parents)[0], mask[theirs_of][:, theirs_of])
    assert torch.equal(depths[0], theirs.tree_seq_position_ids[theirs_of])
    their_parents = ours_of[theirs.parent_node_indices]
    assert torch.equal(parents[0, 1:].long(), their_parents[theirs_of[1:] - 1])

    horizon = int(depths.max())
    lists = ancestor_lists(parents, depths, horizon)[0]
    paths = [ours_of[row[row >= 0]].tolist() for row in theirs.retrieval_indices]
    leaves = [node for node in range(len(parent)) if node not in parent]
    assert sorted(paths) == sorted(path_to(leaf, parent) for leaf in leaves)
    for path in paths:
        assert lists[path[-1]].tolist() == path + [-1] * (horizon + 1 - len(path))

    first_child, next_sibling = (t[0].tolist() for t in child_lists(parents))
    for node, count in enumerate(theirs.num_children_per_node[theirs_of].tolist()):
        children, child = [], first_child[node]
        while child >= 0:
            children.append(child)
            child = next_sibling[child]
        # They number children without the root, parents with it.
        found = theirs.child_node_indices[theirs_of[node], :count] + 1
        assert children == ours_of[found].tolist()
