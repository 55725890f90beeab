"""Seeded sampling: the tokens of plain decoding with the same seed, drawn at every node alike."""

from __future__ import annotations

from typing import Any

import pytest
from engines import (
    Baseline,
    EnginePool,
    Request,
    assert_equal,
    generate,
    greedy,
    sampled,
    tokens,
    traced,
)
from oracle import oracle


@pytest.fixture(scope="module")
def requests(prompts: list[tuple[int, ...]]) -> list[Request]:
    """Every kind of sampling and greedy requests, for one batch."""
    p = prompts
    return [
        sampled(p[0], seed=1),
        greedy(p[1]),
        sampled(p[2], seed=2, top_k=20),
        sampled(p[3], seed=3, top_p=0.9),
        sampled(p[4], seed=4, top_k=50, top_p=0.95, temperature=1.2),
        sampled(p[5], seed=2**40 + 5, max_tokens=40),
        sampled(p[6], seed=6, n=3, max_tokens=32),
        sampled(p[7], seed=7, temperature=0.3),
        greedy(p[8], max_tokens=17),
        sampled(p[9], seed=9, min_tokens=20, ignore_eos=False),
    ]


@pytest.fixture
def tree(pool: EnginePool, baseline: Baseline, requests: list[Request]) -> Any:
    baseline(requests)
    return pool.get("tree")


def test_mixed_batch(tree: Any, baseline: Baseline, requests: list[Request]) -> None:
    with traced(tree) as trace:
        outputs = generate(tree, requests)
    assert_equal(outputs, baseline(requests))
    assert trace.mean_accepted > 0.8


def test_mixed_batch_with_long_paths(
    tree: Any, baseline: Baseline, requests: list[Request]
) -> None:
    with traced(tree) as trace, oracle(tree, baseline(requests)):
        outputs = generate(tree, requests)
    assert_equal(outputs, baseline(requests))
    assert trace.longest_off_sequence >= 6
    assert trace.mean_accepted > 2


def test_one_request_alone(tree: Any, baseline: Baseline, requests: list[Request]) -> None:
    with oracle(tree, baseline(requests)):
        assert_equal(generate(tree, requests[4:5]), baseline(requests[4:5]))


def test_completions_of_one_request_differ(baseline: Baseline, requests: list[Request]) -> None:
    """Or the equalities above would say little about sampling."""
    three = tokens(baseline(requests)[6])
    assert len({tuple(t) for t in three}) == 3


def test_seed_matters(tree: Any, baseline: Baseline, requests: list[Request]) -> None:
    other = sampled(requests[0].prompt, seed=1001)
    assert tokens(generate(tree, [other])[0]) != tokens(baseline(requests[:1])[0])
