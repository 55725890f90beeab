"""The choice of a budget, and the acceptance of smaller trees read off larger ones."""

from __future__ import annotations

import random

import pytest
import torch

from kdtree_runner import ops
from kdtree_runner.spec_decode.budget import (
    MIN_TREES,
    UPDATE_STEPS,
    BudgetTable,
    NodeRates,
    candidates,
    choose,
)

PROBE_STEPS = 64  # model_executor/scheduler.py, which needs vLLM


def rates_of(shares: list[float], trees: int = 1000) -> NodeRates:
    """shares: of trees that accept node 1, 2, ..."""
    rates = NodeRates(len(shares))
    rates.add([trees] * (1 + len(shares)), [trees, *(round(s * trees) for s in shares)])
    return rates


def tokens_of(rates: NodeRates) -> dict[int, float | None]:
    return {budget: rates.tokens(budget) for budget in range(rates.num_nodes + 1)}


def test_candidates() -> None:
    assert candidates(16, 7) == (16, 8, 7, 0)
    assert candidates(8, 7) == (8, 7, 4, 0)
    assert candidates(7, 7) == (7, 3, 0)
    assert candidates(1, 1) == (1, 0)


def test_tokens_are_sums_of_the_first_rates() -> None:
    rates = rates_of([0.8, 0.5, 0.2])
    assert [rates.tokens(k) for k in range(4)] == pytest.approx([1, 1.8, 2.3, 2.5])


def test_choice() -> None:
    tokens = tokens_of(rates_of([0.8, 0.5, 0.2, 0.1]))
    assert choose({4: 1.0, 2: 1.0, 0: 1.0}, tokens) == 4  # nodes cost nothing
    assert choose({4: 1.5, 2: 1.1, 0: 1.0}, tokens) == 2  # 1.73, 2.09, 1
    assert choose({4: 4.0, 2: 2.5, 0: 1.0}, tokens) == 0
    assert choose({4: 2.6, 2: 2.3, 0: 1.0}, tokens) == 0  # equal speeds: the smaller tree


def test_small_gains_change_nothing() -> None:
    tokens = tokens_of(rates_of([0.8, 0.5]))
    times = {2: 2.3, 0: 0.99}
    assert choose(times, tokens) == 0
    assert choose(times, tokens, now=2) == 2
    assert choose(times | {0: 0.9}, tokens, now=2) == 0


def test_the_largest_until_enough_is_known() -> None:
    rates, times = NodeRates(2), {2: 9.0, 0: 1.0}
    assert choose(times, tokens_of(rates)) == 2
    rates.add([200, 200, MIN_TREES - 1], [200, 10, 5])
    assert choose(times, tokens_of(rates)) == 2
    rates.add([0, 0, 2], [0, 0, 0])
    assert choose(times, tokens_of(rates)) == 0


# Milliseconds of a step with all of Kimi K2.6's layers, docs/benchmarks.md, by batch and budget.
KIMI = {
    1: {16: 17.26, 8: 13.56, 7: 12.83, 0: 8.27},
    8: {16: 35.57, 8: 30.32, 7: 29.09, 0: 11.98},
    32: {16: 51.42, 8: 43.83, 7: 40.62, 0: 21.45},
}
NODES = 17


@pytest.mark.parametrize(("per_tree", "budget"), [(4, 7), (0, 0)])
def test_the_first_steps_of_one_request_are_enough(per_tree: int, budget: int) -> None:
    """per_tree: nodes accepted of each tree, the first ones."""
    table = BudgetTable(KIMI, num_nodes=16, max_batch=32)
    trees = UPDATE_STEPS
    accepted = [trees] * (1 + per_tree) + [0] * (NODES - 1 - per_tree)
    assert table.update([trees] * NODES, accepted)
    assert table.budgets[1] == budget


@pytest.mark.parametrize("batch", [1, 32])
def test_a_change_of_traffic_is_noticed(batch: int) -> None:
    """Nothing accepted for long, then 6 nodes of every tree: one step in PROBE_STEPS tells."""
    table = BudgetTable(KIMI, num_nodes=16, max_batch=32)
    for _ in range(1000):
        table.update([batch * UPDATE_STEPS] * NODES, [batch * UPDATE_STEPS] + [0] * 16)
    assert table.budgets[batch] == 0
    probes = 0
    while table.budgets[batch] == 0:
        probes += 1
        table.update([batch] * NODES, [batch] * 7 + [0] * 10)
    assert probes * PROBE_STEPS <= (20_000 if batch == 1 else 1_000)  # steps


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
