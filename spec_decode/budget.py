"""How many nodes a tree should have: what a step costs, against the tokens that it brings.

Nodes stand in the order in which best-first search took them, so the tree of a smaller budget is
the first nodes of a larger one, and of a path that the larger tree accepted it would have accepted
the nodes that it has. Counting accepted nodes by index therefore gives every smaller budget's
acceptance exactly, without running it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# With Kimi's widths too large a budget costs up to 1.8 times the chain's step (docs/benchmarks.md).
# So one request's first steps have to be enough to leave it, and some hundred trees to see that
# traffic has changed.
MIN_TREES = 16  # that a node must have been in before its rate counts for anything
UPDATE_STEPS = 16  # between two looks at the counts
MEMORY = 512  # trees after which an observation has lost 1 - 1 / e of its weight
MIN_GAIN = 0.02  # a change must promise that much: smaller differences are noise of the timing


def candidates(num_nodes: int, horizon: int) -> tuple[int, ...]:
    """Budgets to choose from, largest first: N, N / 2, L (the size of a chain) and none.

    num_nodes: N. horizon: L.
    """
    return tuple(sorted({num_nodes, num_nodes // 2, horizon, 0}, reverse=True))


@dataclass
class NodeRates:
    """How often each node is accepted, over the last trees.

    num_nodes: N. memory: in trees, see MEMORY.
    """

    num_nodes: int
    memory: float = MEMORY
    verified: list[float] = field(init=False)
    accepted: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.verified = [0.0] * (1 + self.num_nodes)
        self.accepted = [0.0] * (1 + self.num_nodes)

    def add(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """verified, accepted: [T], trees that had each node, and that accepted it, the root first.

        A node that a smaller budget leaves out keeps what is known of it.
        """
        for node, (had, took) in enumerate(zip(verified, accepted, strict=True)):
            keep = max(0.0, 1 - had / self.memory)
            self.verified[node] = keep * self.verified[node] + had
            self.accepted[node] = keep * self.accepted[node] + took

    def tokens(self, budget: int) -> float | None:
        """Tokens a tree of `budget` nodes emits on average; None while too little is known."""
        nodes = range(1, budget + 1)
        if any(self.verified[node] < MIN_TREES for node in nodes):
            return None
        return 1 + sum(self.accepted[node] / self.verified[node] for node in nodes)


def choose(
    times: Mapping[int, float], tokens: Mapping[int, float | None], now: int | None = None
) -> int:
    """The budget with the most tokens a second.

    times: seconds of a step by budget. tokens: that a tree emits, by budget, None while too little
    is known of one: then the largest. now: the budget in use, kept unless another one gains more
    than MIN_GAIN.
    """
    speeds: dict[int, float] = {}
    for budget, seconds in times.items():
        emitted = tokens[budget]
        if emitted is None:
            return max(times)
        speeds[budget] = emitted / seconds
    best = max(speeds, key=lambda budget: (speeds[budget], -budget))
    if now in speeds and speeds[best] <= (1 + MIN_GAIN) * speeds[now]:
        return now
    return best


class BudgetTable:
    """The budget of every batch size.

    step_times: seconds of a step by budget, by batch size, not empty; a batch between two sizes
    takes the times of the larger one, as whose graph it runs.
    """

    def __init__(
        self,
        step_times: Mapping[int, Mapping[int, float]],
        num_nodes: int,
        max_batch: int,
        memory: float = MEMORY,
    ) -> None:
        self.step_times = {size: dict(times) for size, times in sorted(step_times.items())}
        self.rates = NodeRates(num_nodes, memory)
        self.budgets = [0] + [num_nodes] * max_batch  # by batch size

    def update(self, verified: Sequence[int], accepted: Sequence[int]) -> bool:
        """Take new counts in (NodeRates.add). Returns whether a budget has changed."""
        self.rates.add(verified, accepted)
        budgets = set().union(*self.step_times.values())
        tokens = {budget: self.rates.tokens(budget) for budget in budgets}
        before = list(self.budgets)
        low = 1
        for size, times in self.step_times.items():
            now = self.budgets[min(size, len(self.budgets) - 1)]
            budget = choose(times, tokens, now)
            for batch in range(low, min(size, len(self.budgets) - 1) + 1):
                self.budgets[batch] = budget
            low = size + 1
        for batch in range(low, len(self.budgets)):  # beyond what was timed: as the largest
            self.budgets[batch] = self.budgets[low - 1]
        return self.budgets != before

    def describe(self) -> str:
        """The step times as text: "batch 1: 16 nodes 3.70, 0 nodes 2.20; ..." in milliseconds."""
        return "; ".join(
            f"batch {size}: " + ", ".join(f"{b} nodes {t * 1e3:.2f}" for b, t in times.items())
            for size, times in self.step_times.items()
        )


class BudgetFeedback:
    """Takes the counts off the device now and then, without waiting for it, and updates the table.

    node_counts: [2, T] int32, TreeState's, set to zero when they are taken.
    """

    def __init__(self, table: BudgetTable, node_counts: Tensor) -> None:
        self.table = table
        self._on_device = node_counts
        on_gpu = node_counts.is_cuda
        self._on_host = torch.zeros(node_counts.shape, dtype=torch.int32, pin_memory=on_gpu)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._pending = False
        self._num_steps = 0

    def step(self) -> bool:
        """After every step. Returns whether the table has changed."""
        if self._pending and (self._copied is None or self._copied.query()):
            self._pending = False
            counts_on_host = self._on_host  # read on the host alone
            return self.table.update(*counts_on_host.tolist())
        self._num_steps += 1
        if self._num_steps % UPDATE_STEPS == 0 and not self._pending:
            self._on_host.copy_(self._on_device, non_blocking=True)
            self._on_device.zero_()
            if self._copied is not None:
                self._copied.record()
            self._pending = True
        return False
