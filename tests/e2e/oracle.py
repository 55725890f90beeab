"""A drafter that knows the future: makes long accepted paths that leave the spine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from engines import runner, tokens
from torch import Tensor

from kdtree_runner import ops

# Of the probability that a position's best candidate leaves: what the second, third and fourth get.
REST = torch.tensor([0.7, 0.2, 0.1])


class Oracle:
    """Replaces the drafter's candidates before the tree is selected; all else is the product's.

    It is calibrated: where it gives its best candidate probability p, the true token is that
    candidate with probability p, else a lower one. A request whose tokens are not among the known
    outputs keeps its own drafts.

    drafts: [L, K] candidate ids and values that the drafter proposed itself, by (tokens so far).
    """

    def __init__(
        self, llm: Any, outputs: Sequence[Any], seed: int = 0, wrong: bool = False
    ) -> None:
        """outputs: RequestOutputs that will come again. wrong: propose what they will not say."""
        self.runner, self.wrong = runner(llm), wrong
        self.speculator = self.runner.speculator
        self.vocab_size = self.runner.vocab_size
        self.futures: dict[tuple[int, ...], list[list[int]]] = {}
        for output in outputs:
            known = self.futures.setdefault(tuple(output.prompt_token_ids), [])
            known.extend(tokens(output))
        self.generator = torch.Generator().manual_seed(seed)
        self.drafts: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._select = self.speculator._grow

    def grow(self, num_reqs: int, out_tokens: Tensor) -> None:
        """In the place of TreeSpeculator._grow, which it calls in the end."""
        horizon, spec = self.speculator.tree.horizon, self.speculator
        all_values, all_ids, all_lse = spec.candidates.views(num_reqs * horizon)
        for b in range(num_reqs):
            rows = slice(b * horizon, (b + 1) * horizon)
            prompt, output = self._history(int(spec.write_rows[b]))
            ids, values = all_ids[0, rows], all_values[0, rows]
            self.drafts[prompt + output] = ids.clone(), values.clone()
            future = self._future(prompt, output)
            if future is not None:
                logits = self._logits(future, horizon)
                ops.build_candidates(logits, values, ids, all_lse[0, rows])
        self._select(num_reqs, out_tokens)

    def _history(self, slot: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Prompt and output so far of the request in one slot."""
        states = self.runner.req_states
        prompt_len, total_len = int(states.prompt_len.np[slot]), int(states.total_len.gpu[slot])
        ids = states.all_token_ids.gpu[slot, :total_len].tolist()
        return tuple(ids[:prompt_len]), tuple(ids[prompt_len:])

    def _future(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[int] | None:
        """What comes after `output`; None for an unknown request, or one inside its prompt."""
        for known in self.futures.get(prompt, []):
            if output and tuple(known[: len(output)]) == output:
                return known[len(output) :]
        return None

    def _logits(self, future: list[int], horizon: int) -> Tensor:
        """[L, V] logits of a calibrated drafter, or of one that is always wrong."""
        logits = torch.full((horizon, self.vocab_size), -30.0)
        for depth in range(horizon):
            best = 0.4 + 0.55 * torch.rand(1, generator=self.generator)
            probs = torch.cat([best, (1 - best) * REST])
            candidates = torch.randperm(self.vocab_size, generator=self.generator)[: len(probs) + 1]
            if depth < len(future):
                candidates = candidates[candidates != future[depth]][: len(probs)]
                if not self.wrong:
                    rank = torch.multinomial(probs, 1, generator=self.generator)
                    candidates[rank] = future[depth]
            logits[depth, candidates[: len(probs)]] = probs.log()
        return logits


@contextmanager
def oracle(
    llm: Any, outputs: Sequence[Any], seed: int = 0, wrong: bool = False
) -> Iterator[Oracle]:
    """Draft with an Oracle while the block runs."""
    seer = Oracle(llm, outputs, seed, wrong)
    seer.speculator._grow = seer.grow
    try:
        yield seer
    finally:
        del seer.speculator._grow
