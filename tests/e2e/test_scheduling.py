"""What vLLM's scheduler does to trees: cut, preempt, chunk, cache and overlap them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from engines import (
    MAX_NUM_SEQS,
    Baseline,
    EnginePool,
    Request,
    Trace,
    assert_equal,
    differences,
    generate,
    greedy,
    metric,
    runner,
    sampled,
    tokens,
    traced,
)
from oracle import oracle

BUDGET = 16
NO_CACHE = {"enable_prefix_caching": False}


def check(llm: Any, requests: Sequence[Request], baseline: Baseline, seed: int = 0) -> Trace:
    """Equal to the baseline with long paths."""
    want = baseline(requests)
    with traced(llm) as trace, oracle(llm, want, seed):
        assert_equal(generate(llm, requests), want)
    assert trace.longest_off_sequence >= 4
    return trace


@pytest.fixture(scope="module")
def staggered(prompts: list[tuple[int, ...]]) -> list[Request]:
    """More requests than slots, which end at different times."""
    requests = [
        (greedy if i % 2 else sampled)(
            prompt, **({} if i % 2 else {"seed": i}), max_tokens=5 + 6 * i
        )
        for i, prompt in enumerate(prompts[32:44])
    ]
    assert len(requests) > MAX_NUM_SEQS
    return requests


def test_slots_are_reused(pool: EnginePool, baseline: Baseline, staggered: list[Request]) -> None:
    baseline(staggered)
    llm = pool.get("tree")
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    for seed in (0, 1):  # twice: nothing of the first run is left behind
        trace = check(llm, staggered, baseline, seed)
        assert trace.num_mixed > 0  # a prompt beside drafts


def test_without_async_scheduling(
    pool: EnginePool, baseline: Baseline, staggered: list[Request]
) -> None:
    baseline(staggered)
    llm = pool.get("tree", async_scheduling=False, spec={"tree_spine": True}, **NO_CACHE)
    assert not llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    check(llm, staggered, baseline)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_chunked_prefill(
    pool: EnginePool,
    baseline: Baseline,
    prompts: list[tuple[int, ...]],
    async_scheduling: bool,
) -> None:
    """Few tokens a step: prompts come in pieces beside drafts, and trees are cut to fit."""
    by_length = sorted(prompts, key=len)
    requests = [greedy(p, max_tokens=48) for p in by_length[:7]]
    requests += [greedy(p, max_tokens=20) for p in by_length[-3:]]
    baseline(requests)
    settings = {"max_num_batched_tokens": 140, "async_scheduling": async_scheduling, **NO_CACHE}
    trace = check(pool.get("tree", **settings), requests, baseline)
    assert trace.num_mixed > 5
    assert trace.num_cut(BUDGET) > 0


LIMIT = 120  # tokens of prompt and output together


@pytest.fixture(scope="module")
def to_the_limit(prompts: list[tuple[int, ...]]) -> list[Request]:
    """Requests of different lengths that end when the context of LIMIT tokens is full."""
    pieces = [p[: 100 - 9 * i] for i, p in enumerate(prompts[50:58])]
    return [greedy(p, max_tokens=LIMIT - len(p)) for p in pieces]


def test_max_model_len(pool: EnginePool, baseline: Baseline, to_the_limit: list[Request]) -> None:
    """The last trees are cut, then there is room for none."""
    want = baseline(to_the_limit)
    llm = pool.get("tree", max_model_len=LIMIT)
    with traced(llm) as trace, oracle(llm, want):
        outputs = generate(llm, [greedy(r.prompt, max_tokens=400) for r in to_the_limit])
    assert_equal(outputs, want)
    assert trace.num_cut(BUDGET) > 8
    assert min(trace.num_nodes) <= 3
    assert trace.longest_off_sequence >= 5
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_max_model_len_with_uniform_metadata(
    pool: EnginePool,
    baseline: Baseline,
    to_the_limit: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: a builder that wants one length takes a cut tree for a prompt."""
    from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport

    want = baseline(to_the_limit)
    llm = pool.get("tree", max_model_len=LIMIT)
    groups = [group for groups in runner(llm).attn_groups for group in groups]
    builders = [b for g in groups for b in g.metadata_builders if hasattr(b, "tree_state")]
    assert builders
    for builder in builders:
        monkeypatch.setattr(builder, "query_len_support", QueryLenSupport.UNIFORM)
    assert llm.reset_prefix_cache()
    with oracle(llm, want):
        assert differences(generate(llm, to_the_limit), want)
    assert llm.reset_prefix_cache()


def test_budget_by_batch_size(
    pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]
) -> None:
    """vLLM's dynamic number of drafts cuts every tree of a larger batch to its first nodes."""
    requests = [greedy(p, max_tokens=24 + 8 * (i % 3)) for i, p in enumerate(prompts[58:64])]
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 1, BUDGET], [2, 8, 5]]}
    baseline(requests)
    llm = pool.get("tree", spec=schedule)
    assert 5 in check(llm, requests, baseline).num_nodes
    trace = check(llm, requests[:1], baseline)
    assert BUDGET in trace.num_nodes


def test_a_chunk_as_wide_as_a_tree_beside_requests_without_drafts(
    pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]
) -> None:
    """The first request drafts while there are three; then it goes on without, and chunks of
    1 + N tokens of a prompt must not come before it in the batch: only prompts follow a prompt.
    """
    long_prompt = max(prompts, key=len)[:300]
    assert len(long_prompt) > 12 * (1 + BUDGET)
    by_batch = [[1, 2, 0], [3, 8, BUDGET]]
    llm = pool.get(
        "tree",
        spec={"num_speculative_tokens_per_batch_size": by_batch},
        long_prefill_token_threshold=1 + BUDGET,
        **NO_CACHE,
    )
    for seed, short in enumerate(prompts[:6]):
        first = (
            sampled(short[:20], seed=seed, max_tokens=60) if seed % 2 else greedy(short[:20], 60)
        )
        requests = [first, greedy(prompts[8 + seed][:20], 12), greedy(long_prompt, 4)]
        with traced(llm) as trace:
            assert_equal(generate(llm, requests), baseline(requests))
        assert trace.num_nodes


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_preemption(
    pool: EnginePool,
    baseline: Baseline,
    prompts: list[tuple[int, ...]],
    async_scheduling: bool,
) -> None:
    """A cache too small for the batch: requests are thrown out and start again."""
    chosen = [p for p in prompts if 60 <= len(p) <= 130][:6]
    requests = [(greedy(p, 48) if i % 2 else sampled(p, i, 48)) for i, p in enumerate(chosen)]
    baseline(requests)
    settings = {"num_gpu_blocks_override": 36, "async_scheduling": async_scheduling}
    llm = pool.get("tree", horizon=5, **settings)
    before = metric(llm, "vllm:num_preemptions")
    check(llm, requests, baseline)
    assert metric(llm, "vllm:num_preemptions") > before


def test_prefix_cache(pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]) -> None:
    """Blocks that hold committed rows of trees serve later requests as prompts."""
    first = greedy(max(prompts[:32], key=len)[:200], max_tokens=64)
    want = baseline([first])
    llm = pool.get("tree")
    assert llm.reset_prefix_cache()
    with traced(llm) as trace, oracle(llm, want):
        assert_equal(generate(llm, [first]), want)
    assert trace.num_off_sequence > 3

    again = generate(llm, [first])
    assert_equal(again, want)
    assert again[0].num_cached_tokens >= 176

    spoken = [*first.prompt, *tokens(want[0])[0]]
    follow_up = greedy([*spoken, *prompts[1][:20]])
    want = baseline([follow_up])
    llm = pool.get("tree")
    with oracle(llm, want):
        outputs = generate(llm, [follow_up])
    assert_equal(outputs, want)
    assert outputs[0].num_cached_tokens >= 240  # written by verify steps, moved by the commit
