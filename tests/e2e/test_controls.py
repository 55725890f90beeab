"""Negative controls: with one part of DDTree broken, the equalities elsewhere must fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engines import (
    Baseline,
    EnginePool,
    Request,
    assert_equal,
    differences,
    generate,
    greedy,
    runner,
    sampled,
    traced,
)
from oracle import oracle


@pytest.fixture(scope="module")
def greedy_requests(prompts: list[tuple[int, ...]]) -> list[Request]:
    return [greedy(p, 40) for p in prompts[:4]]


@pytest.fixture(scope="module")
def seeded_requests(prompts: list[tuple[int, ...]]) -> list[Request]:
    return [sampled(p, i, 40) for i, p in enumerate(prompts[:4])]


@pytest.fixture
def tree(pool: EnginePool, baseline: Baseline, greedy_requests: list[Request]) -> Iterator[Any]:
    """An engine to break: what it leaves in the prefix cache is thrown away before and after."""
    baseline(greedy_requests)
    llm = pool.get("tree")
    assert llm.reset_prefix_cache()
    yield llm
    assert llm.reset_prefix_cache()


def run(llm: Any, requests: list[Request], want: list[Any]) -> list[str]:
    """What differs from the baseline when long paths off the spine are accepted."""
    with traced(llm) as trace, oracle(llm, want):
        outputs = generate(llm, requests)
    assert trace.paths
    return differences(outputs, want)


def test_intact(
    tree: Any, baseline: Baseline, greedy_requests: list[Request], seeded_requests: list[Request]
) -> None:
    """The same requests on the engine as it is: no difference."""
    requests = greedy_requests + seeded_requests
    assert run(tree, requests, baseline(requests)) == []


def test_rope_by_node_instead_of_depth(
    tree: Any, baseline: Baseline, greedy_requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_runner = runner(tree)
    prepare_attn = model_runner.prepare_attn

    def by_node(batch: Any) -> Any:
        result = prepare_attn(batch)
        rows, node = batch.logits_indices, batch.expanded_local_pos.long()
        positions = model_runner.input_buffers.positions
        positions[rows] = positions[rows - node] + node
        return result

    monkeypatch.setattr(model_runner, "prepare_attn", by_node)
    assert run(tree, greedy_requests, baseline(greedy_requests))


def test_no_commit(
    tree: Any, baseline: Baseline, greedy_requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner(tree).rejection_sampler, "commit", lambda batch: None)
    assert run(tree, greedy_requests, baseline(greedy_requests))


def test_no_ancestor_mask(
    tree: Any, baseline: Baseline, greedy_requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request a chain to verify_attn: a node then sees its elder siblings too."""
    model_runner = runner(tree)
    prepare_attn = model_runner.prepare_attn

    def chains(batch: Any) -> Any:
        result = prepare_attn(batch)
        saved = model_runner.tree_state.tree_rows.clone()
        model_runner.tree_state.tree_rows.fill_(-1)
        model_runner.saved_rows = saved
        return result

    sample = model_runner.sample

    def restored(*args: Any) -> Any:
        model_runner.tree_state.tree_rows.copy_(model_runner.saved_rows)
        return sample(*args)

    monkeypatch.setattr(model_runner, "prepare_attn", chains)
    monkeypatch.setattr(model_runner, "sample", restored)
    assert run(tree, greedy_requests, baseline(greedy_requests))


def test_noise_by_node_instead_of_position(
    tree: Any,
    baseline: Baseline,
    greedy_requests: list[Request],
    seeded_requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler, state = runner(tree).sampler, runner(tree).tree_state
    sample = sampler.sample

    def by_node(
        logits: Any,
        slots: Any,
        idx: Any,
        idx_np: Any,
        pos: Any,
        ids: Any,
        node: Any,
        *rest: Any,
        **kw: Any,
    ) -> Any:
        pos = pos - state.depths[slots, node.long()] + node
        return sample(logits, slots, idx, idx_np, pos, ids, node, *rest, **kw)

    want = baseline(seeded_requests)
    monkeypatch.setattr(sampler, "sample", by_node)
    assert run(tree, seeded_requests, want)
    assert run(tree, greedy_requests, baseline(greedy_requests)) == []


def test_penalties_on_a_tree(
    tree: Any,
    baseline: Baseline,
    prompts: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM counts every row before a node as its past, which on a tree is wrong."""
    from kdtree_runner.model_executor import model_runner

    requests = [greedy(p, 24, frequency_penalty=1.0) for p in prompts[:3]]
    want = baseline(requests)
    monkeypatch.setattr(model_runner, "needs_chain", lambda params, custom: False)
    assert run(tree, requests, want)


def test_comparison_sees_one_token(baseline: Baseline, greedy_requests: list[Request]) -> None:
    """The comparison itself: another answer, and an answer cut short."""
    want = baseline(greedy_requests)
    shorter = baseline([greedy(r.prompt, 39) for r in greedy_requests])
    assert len(differences(want[::-1], want)) >= 2
    assert len(differences(shorter, want)) == len(want)
    with pytest.raises(AssertionError, match="tokens differ at the end"):
        assert_equal(shorter, want)
