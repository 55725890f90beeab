"""What the drafter is worth: tokens a step of the chain and of a tree, on held-out prompts.

Greedy speculative decoding emits exactly the target's greedy text. So it is enough to write that
text once, draft a block at each of its positions, and walk: how far does a block agree with it?

    python -m examples.tiny_kimi.evaluate --num-prompts 32
"""

import argparse
import heapq
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .drafter_model import Drafter
from .export import load_drafter, load_target
from .generate import continue_prompts
from .target_model import Target


@dataclass
class Acceptance:
    """tokens a step include the target's own (bonus) token.

    by_position[k]: of the chain's steps, the share that accepted at least k + 1 tokens.
    by_budget[N]: tokens a step of a best-first tree of N nodes.
    """

    chain: float
    by_position: list[float]
    by_budget: dict[int, float]

    def __str__(self) -> str:
        positions = " ".join(f"{share:.3f}" for share in self.by_position)
        trees = " ".join(f"N={n}: {tokens:.2f}" for n, tokens in self.by_budget.items())
        return f"chain {self.chain:.2f} tokens/step (by position {positions}), tree {trees}"


def tree_depth(logp: list[list[float]], tokens: list[list[int]], truth: list[int], n: int) -> int:
    """How many tokens of `truth` a best-first tree of n nodes contains.

    logp, tokens: [L][top], the drafter's best candidates at each position, best first.
    """
    heap = [(-logp[0][0], (0,))]  # (-log-probability of the prefix, rank of the token per depth)
    depth = 0
    for _ in range(n):
        if not heap:
            break
        cost, ranks = heapq.heappop(heap)
        level, last = len(ranks) - 1, ranks[-1]
        if all(tokens[d][r] == truth[d] for d, r in enumerate(ranks)):
            depth = max(depth, len(ranks))
        if last + 1 < len(tokens[level]):  # the next sibling
            sibling = cost + logp[level][last] - logp[level][last + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], last + 1)))
        if level + 1 < len(logp):  # the best child
            heapq.heappush(heap, (cost - logp[level + 1][0], (*ranks, 0)))
    return depth


def _walk(first: int, end: int, accepted: dict[int, int]) -> list[int]:
    """The accepted counts of the steps that emit positions first + 1 ... end - 1."""
    steps, position = [], first
    while position < end:
        steps.append(accepted[position])
        position += accepted[position] + 1
    return steps


@torch.no_grad()
def draft_top(
    target: Target, drafter: Drafter, ids: Tensor, anchors: Tensor, top: int
) -> tuple[Tensor, Tensor]:
    """The drafter's candidates at each anchor.

    ids: [1, S]; anchors: [1, A]. Returns log-probabilities and tokens, each [A, L, top].
    """
    _, outputs = target(ids)
    hidden = drafter(target, outputs, ids, anchors)
    logp, tokens = target.logits(hidden).log_softmax(-1).topk(top, dim=-1)
    return logp[0], tokens[0]


def greedy_texts(target: Target, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Every prompt with num_new greedy tokens behind it, all written in one batch."""
    device, lengths = target.embed_tokens.weight.device, [len(p) for p in prompts]
    padded = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    num_prompt = torch.tensor(lengths, device=device)
    text = continue_prompts(target, padded.to(device), num_prompt, max(lengths) + num_new)
    rows = text.ids.tolist()
    return [row[: n + num_new] for row, n in zip(rows, lengths, strict=True)]


def accepted_counts(
    target: Target, drafter: Drafter, text: list[int], first: int, budgets: tuple[int, ...]
) -> dict[int, dict[int, int]]:
    """Tokens of a block that agree with the text, for every anchor from `first` on.

    Returns {budget: {anchor: count}}; budget 0 stands for the chain.
    """
    horizon = drafter.cfg.horizon
    anchors = range(first, len(text) - horizon)
    device = target.embed_tokens.weight.device
    ids, positions = (torch.tensor([list(x)], device=device) for x in (text, anchors))
    logp, tokens = (x.tolist() for x in draft_top(target, drafter, ids, positions, top=16))
    accepted: dict[int, dict[int, int]] = {n: {} for n in (0, *budgets)}
    for i, anchor in enumerate(anchors):
        truth = text[anchor + 1 : anchor + 1 + horizon]
        wrong = (k for k in range(horizon) if tokens[i][k][0] != truth[k])
        accepted[0][anchor] = next(wrong, horizon)
        for n in budgets:
            accepted[n][anchor] = tree_depth(logp[i], tokens[i], truth, n)
    return accepted


def measure(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    num_tokens: int = 64,
    budgets: tuple[int, ...] = (8, 16, 32),
) -> Acceptance:
    """Decode num_tokens greedily after every prompt and count steps."""
    horizon = drafter.cfg.horizon
    steps: dict[int, list[int]] = {n: [] for n in (0, *budgets)}
    # L more tokens than are counted, so that the last block has something to agree with
    for prompt, text in zip(
        prompts, greedy_texts(target, prompts, num_tokens + horizon), strict=True
    ):
        accepted = accepted_counts(target, drafter, text, len(prompt), budgets)
        for n, counts in accepted.items():
            steps[n] += _walk(len(prompt), len(prompt) + num_tokens, counts)
    chain = steps[0]
    return Acceptance(
        chain=1 + sum(chain) / len(chain),
        by_position=[sum(s > k for s in chain) / len(chain) for k in range(horizon)],
        by_budget={n: 1 + sum(steps[n]) / len(steps[n]) for n in budgets},
    )


def read_prompts(heldout: Path, tokenizer_json: Path, count: int) -> list[list[int]]:
    """Token ids of the first `count` held-out prompts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    rows = [json.loads(line) for line in heldout.read_text().splitlines()[:count]]
    return [tokenizer.encode(row["prompt"]).ids for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, default=Path(__file__).parent)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    target, drafter = (load_target(args.pair / "target"), load_drafter(args.pair / "drafter"))
    tokenizer = args.pair / "target" / "tokenizer.json"
    prompts = read_prompts(Path(__file__).parent / "heldout.jsonl", tokenizer, args.num_prompts)
    print(measure(target, drafter, prompts, args.max_tokens))


if __name__ == "__main__":
    main()
