"""What speculation achieved: tokens a step and acceptance, from an engine's counters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True)
class AcceptanceStats:
    """Counters of verified drafts, summed over requests and steps, as vLLM keeps them.

    num_drafts: request-steps that verified a tree or chain.
    num_draft_tokens: nodes verified, roots not counted.
    num_accepted_tokens: nodes accepted.
    num_accepted_per_pos: entry i counts the drafts of which more than i nodes were accepted, so it
        is the acceptance at depth i + 1 of a tree.

    Rates are 0 where nothing was drafted. `-` gives what happened between two readings.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_pos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        per_pos = tuple(self.num_accepted_per_pos)
        object.__setattr__(self, "num_accepted_per_pos", per_pos)
        counters = (self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens, *per_pos)
        if min(counters) < 0:
            raise ValueError(f"counters must be at least 0, got {counters}")
        if self.num_accepted_tokens > self.num_draft_tokens:
            wanted = f"at most num_draft_tokens ({self.num_draft_tokens})"
            raise ValueError(
                f"num_accepted_tokens must be {wanted}, got {self.num_accepted_tokens}"
            )

    @classmethod
    def from_lengths(cls, accepted: Iterable[int], num_nodes: int) -> AcceptanceStats:
        """From the accepted nodes of each draft, every one of `num_nodes` nodes."""
        lengths = list(accepted)
        per_pos = [sum(n > i for n in lengths) for i in range(max(lengths, default=0))]
        return cls(len(lengths), num_nodes * len(lengths), sum(lengths), tuple(per_pos))

    def __add__(self, other: AcceptanceStats) -> AcceptanceStats:
        return self._combine(other, 1)

    def __sub__(self, other: AcceptanceStats) -> AcceptanceStats:
        return self._combine(other, -1)

    def _combine(self, other: AcceptanceStats, sign: int) -> AcceptanceStats:
        pairs = zip_longest(self.num_accepted_per_pos, other.num_accepted_per_pos, fillvalue=0)
        return AcceptanceStats(
            self.num_drafts + sign * other.num_drafts,
            self.num_draft_tokens + sign * other.num_draft_tokens,
            self.num_accepted_tokens + sign * other.num_accepted_tokens,
            tuple(a + sign * b for a, b in pairs),
        )

    @property
    def mean_accepted(self) -> float:
        """Accepted nodes a step and request."""
        return _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted a step and request: the accepted nodes and the target's own token."""
        return _ratio(self.num_drafts + self.num_accepted_tokens, self.num_drafts)

    @property
    def mean_nodes(self) -> float:
        """Nodes verified a step and request."""
        return _ratio(self.num_draft_tokens, self.num_drafts)

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the verified nodes; of a tree it is low by construction."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def rate_per_pos(self) -> list[float]:
        """Share of drafts accepted to depth i + 1 or deeper."""
        return [_ratio(n, self.num_drafts) for n in self.num_accepted_per_pos]

    @property
    def step_rate_per_pos(self) -> list[float]:
        """Of the drafts accepted to depth i, the share accepted to depth i + 1 too."""
        reached = (self.num_drafts, *self.num_accepted_per_pos)
        return [_ratio(n, of) for n, of in zip(self.num_accepted_per_pos, reached, strict=False)]

    def to_dict(self) -> dict[str, Any]:
        """Counters and rates, ready for JSON."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_per_pos": list(self.num_accepted_per_pos),
            "tokens_per_step": self.tokens_per_step,
            "mean_accepted": self.mean_accepted,
            "mean_nodes": self.mean_nodes,
            "acceptance_rate": self.acceptance_rate,
            "rate_per_pos": self.rate_per_pos,
            "step_rate_per_pos": self.step_rate_per_pos,
        }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
