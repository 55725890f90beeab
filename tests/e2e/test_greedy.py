"""Greedy decoding: DDTree emits the tokens of plain decoding, whatever is accepted."""

from __future__ import annotations

from typing import Any

import pytest
from engines import (
    Baseline,
    EnginePool,
    Request,
    assert_equal,
    generate,
    generate_one_by_one,
    greedy,
    metric,
    traced,
)
from oracle import oracle

NUM_PROMPTS = 32

# Accepted nodes a step that the trained drafter must reach. With N = 1 it drafts one position in a
# block of 2, and it was trained on blocks of 8.
ACCEPTED = {1: 0.2, 7: 2.0, 16: 2.3, 31: 2.5}


@pytest.fixture(scope="module")
def requests(prompts: list[tuple[int, ...]]) -> list[Request]:
    """Prompts of 20 to 400 tokens: more of them than slots, so that steps mix lengths."""
    chosen = prompts[:NUM_PROMPTS]
    assert len(chosen) == NUM_PROMPTS
    assert max(map(len, chosen)) > 4 * min(map(len, chosen))
    return [greedy(prompt) for prompt in chosen]


@pytest.fixture(scope="module", params=sorted(ACCEPTED))
def budget(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def tree(pool: EnginePool, baseline: Baseline, requests: list[Request], budget: int) -> Any:
    baseline(requests)  # before the tree engine, so that both are alive together
    return pool.get("tree", budget=budget)


def test_batched(tree: Any, budget: int, baseline: Baseline, requests: list[Request]) -> None:
    with traced(tree) as trace:
        outputs = generate(tree, requests)
    assert_equal(outputs, baseline(requests))
    assert max(trace.num_nodes) == budget
    assert trace.mean_accepted > ACCEPTED[budget]
    assert (trace.num_off_sequence > 0) == (budget > 1)


def test_one_by_one(tree: Any, baseline: Baseline, requests: list[Request]) -> None:
    assert_equal(generate_one_by_one(tree, requests), baseline(requests))


def test_long_paths(tree: Any, budget: int, baseline: Baseline, requests: list[Request]) -> None:
    few = requests[:8]
    with traced(tree) as trace, oracle(tree, baseline(few)):
        outputs = generate(tree, few)
    assert_equal(outputs, baseline(few))
    if budget >= 7:
        assert trace.longest_off_sequence >= 5
        assert trace.num_off_sequence > len(trace.paths) / 3


def test_chain_of_vllm_accepts_less(
    pool: EnginePool, baseline: Baseline, requests: list[Request]
) -> None:
    """vLLM's own DFlash chain on the same pair; also the only user of its rejection sampler."""
    few = [greedy(r.prompt, 32) for r in requests[:6]]  # its kernels run in the interpreter
    want = baseline(few)
    tree = pool.get("tree")
    with traced(tree) as trace:
        assert_equal(generate(tree, few), want)
    chain = pool.get("chain")
    assert_equal(generate(chain, few), want)
    steps = metric(chain, "vllm:spec_decode_num_drafts")
    accepted = metric(chain, "vllm:spec_decode_num_accepted_tokens") / steps
    assert trace.mean_accepted > accepted + 0.3


def test_drafts_right_after_the_prompt(
    pool: EnginePool, baseline: Baseline, requests: list[Request]
) -> None:
    """vLLM takes rows of the first step for placeholders by position minus row: wrong on a tree."""
    few = [greedy(r.prompt, 9) for r in requests[:8]]
    want = baseline(few)
    tree = pool.get("tree")
    first_paths = []
    for request, output in zip(few, want, strict=True):
        with traced(tree) as trace, oracle(tree, [output], seed=len(first_paths)):
            assert_equal(generate(tree, [request]), [output])
        first_paths.append(trace.paths[0])
    assert sum(path != list(range(1, len(path) + 1)) for path in first_paths) >= 3
