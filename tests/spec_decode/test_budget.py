"""The choice of a budget, and the acceptance of smaller trees read off larger ones."""

from __future__ import annotations

import random

import pytest
import torch

from kdtree_runner import ops
from kdtree_runner.spec_decode.budget import BudgetTable, NodeRates, candidates, choose


def rates_of(shares: list[float], trees: int = 1000) -> NodeRates:
    """shares: of trees that accept node 1, 2, ..."""
    rates = NodeRates(len(shares))
    rates.add([trees] * (1 + len(shares)), [trees, *(round(s * trees) for s in shares)])
    return rates


def test_candidates() -> None:
    assert candidates(16, 7) == (16, 8, 7, 0)
    assert candidates(8, 7) == (8, 7, 4, 0)
    assert candidates(7, 7) == (7, 3, 0)
    assert candidates(1, 1) == (1, 0)


def test_tokens_are_sums_of_the_first_rates() -> None:
    rates = rates_of([0.8, 0.5, 0.2])
    assert [rates.tokens(k) for k in range(4)] == pytest.approx([1, 1.8, 2.3, 2.5])


def test_choice() -> None:
    rates = rates_of([0.8, 0.5, 0.2, 0.1])
    assert choose({4: 1.0, 2: 1.0, 0: 1.0}, rates) == 4  # nodes cost nothing
    assert choose({4: 1.5, 2: 1.1, 0: 1.0}, rates) == 2  # 1.73, 2.09, 1
    assert choose({4: 4.0, 2: 2.5, 0: 1.0}, rates) == 0
    assert choose({4: 2.6, 2: 2.3, 0: 1.0}, rates) == 0  # equal speeds: the smaller tree


def test_small_gains_change_nothing() -> None:
    rates = rates_of([0.8, 0.5])
    times = {2: 2.3, 0: 0.99}
    assert choose(times, rates) == 0
    assert choose(times, rates, now=2) == 2
    assert choose(times | {0: 0.9}, rates, now=2) == 0


def test_the_largest_until_enough_is_known() -> None:
    rates = NodeRates(2)
    assert choose({2: 9.0, 0: 1.0}, rates) == 2
    rates.add([200, 200, 100], [200, 10, 5])
    assert choose({2: 9.0, 0: 1.0}, rates) == 2
    rates.add([0, 0, 100], [0, 0, 5])
    assert choose({2: 9.0, 0: 1.0}, rates) == 0


def test_what_is_left_out_keeps_its_rate_and_the_rest_forgets() -> None:
    rates = NodeRates(2, memory=1000)
    rates.add([900, 900, 900], [900, 900, 450])
    for _ in range(50):
        rates.add([300, 300, 0], [300, 0, 0])
    assert rates.accepted[1] / rates.verified[1] < 1e-6
    assert rates.accepted[2] / rates.verified[2] == 0.5


def test_table() -> None:
    times = {1: {4: 1.1, 2: 1.0, 0: 0.9}, 2: {4: 2.0, 2: 1.1, 0: 1.0}, 8: {4: 9.0, 2: 8.0, 0: 2.0}}
    table = BudgetTable(times, num_nodes=4, max_batch=10)
    assert table.budgets == [0] + [4] * 10
    assert table.update([1000] * 5, [1000, 800, 500, 400, 300])
    assert table.budgets == [0, 4, 2, 0, 0, 0, 0, 0, 0, 0, 0]
    assert not table.update([1000] * 5, [1000, 800, 500, 400, 300])


def test_without_times_nothing_changes() -> None:
    table = BudgetTable({}, num_nodes=4, max_batch=3)
    assert not table.update([1000] * 5, [1000, 0, 0, 0, 0])
    assert table.budgets == [0, 4, 4, 4]


@pytest.mark.parametrize("seed", range(5))
def test_smaller_trees_are_exact(seed: int) -> None:
    """Trees cut to each budget and walked anew emit the tokens that the counts foretell."""
    rng = random.Random(seed)
    num_trees, num_nodes, max_path = 300, 12, 8
    width = 1 + num_nodes
    parents = torch.tensor(
        [[-1, *(rng.randrange(n) for n in range(1, width))] for _ in range(num_trees)],
        dtype=torch.int32,
    )
    # Siblings have distinct tokens, as the drafter's candidates have.
    tokens = torch.tensor([[rng.randrange(10**6) for _ in range(width)] for _ in range(num_trees)])
    targets = torch.full_like(tokens, -5)
    for tree in range(num_trees):
        for node in range(width):
            children = [n for n in range(width) if parents[tree, n] == node]
            if children and rng.random() < 0.8:
                targets[tree, node] = tokens[tree, rng.choice(children)]

    def walk(budget: int, counts: torch.Tensor | None = None) -> int:
        rows = 1 + budget
        start = (torch.arange(num_trees + 1) * rows).int()
        outputs = (
            torch.zeros(num_trees, max_path, dtype=torch.int32),
            torch.zeros(num_trees, width, dtype=torch.int64),
            torch.zeros(num_trees, dtype=torch.int32),
        )
        slots = torch.arange(num_trees, dtype=torch.int32)
        cut = [t[:, :rows].flatten().contiguous() for t in (tokens, targets)]
        ops.tree_accept(*cut, start, slots, parents, *outputs, node_counts=counts)
        return int(outputs[2].sum())

    counts = torch.zeros(2, width, dtype=torch.int32)
    walk(num_nodes, counts)
    rates = NodeRates(num_nodes)
    rates.add(*counts.tolist())
    for budget in range(num_nodes + 1):
        tokens_a_tree = rates.tokens(budget)
        assert tokens_a_tree is not None
        assert round(tokens_a_tree * num_trees) == walk(budget)
