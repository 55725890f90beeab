"""Trees that shrink with the batch: the same tokens, and the acceptance that was foretold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engines import (
    MAX_NUM_SEQS,
    Baseline,
    EnginePool,
    Request,
    assert_equal,
    generate,
    greedy,
    runner,
    sampled,
    scheduler,
    traced,
)

from kdtree_runner.spec_decode.budget import BudgetTable, NodeRates, candidates

BUDGETS = (16, 8, 7, 0)


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def adaptive(pool: EnginePool, request: pytest.FixtureRequest) -> Iterator[Any]:
    llm = pool.get("tree", async_scheduling=request.param, spec={"tree_budget_adapt": True})
    assert llm.reset_prefix_cache()
    yield llm
    prefer(llm, dict.fromkeys(range(1, MAX_NUM_SEQS + 1), 16))


def prefer(llm: Any, budgets: dict[int, int]) -> None:
    """Let the worker believe that these budgets are by far the fastest, by batch size."""
    table = runner(llm)._budgets.table
    table.step_times = {
        size: {budget: 1.0 if budget == wanted else 1e6 for budget in BUDGETS}
        for size, wanted in budgets.items()
    }
    table.rates = NodeRates(16)
    table.rates.add([1000] * 17, [1000] + [300] * 16)
    table.update([0] * 17, [0] * 17)
    scheduler(llm)._table = list(table.budgets)


@pytest.fixture(scope="module")
def shrinking(prompts: list[tuple[int, ...]]) -> list[Request]:
    """Requests that end one after another, so that every batch size occurs."""
    return [
        sampled(p, seed=i, max_tokens=20 + 14 * i) if i % 2 else greedy(p, 20 + 14 * i)
        for i, p in enumerate(prompts[:MAX_NUM_SEQS])
    ]


def test_steps_are_timed_at_start_up(adaptive: Any) -> None:
    table = runner(adaptive)._budgets.table
    assert adaptive.llm_engine.vllm_config.scheduler_config.scheduler_cls.startswith(
        "kdtree_runner.model_executor.scheduler.Adaptive"
    )
    assert isinstance(table, BudgetTable)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        # A step holds three requests of 9 tokens and 7 of the drafter's, or of 5 and 7.
        ({"budget": 8, "max_num_seqs": 8, "max_num_batched_tokens": 48}, [1, 2]),
        ({"budget": 7, "max_num_seqs": 40, "max_num_batched_tokens": 256}, [1, 2, 4, 8, 16]),
        ({"budget": 2, "horizon": 2, "max_num_seqs": 1, "max_num_batched_tokens": 16}, [1]),
        ({"budget": 16, "max_num_seqs": 2, "max_model_len": 100}, [1, 2]),
        ({"budget": 64, "max_num_seqs": 2, "max_model_len": 256}, [1, 2]),
        ({"budget": 255, "max_num_seqs": 2, "max_model_len": 512}, []),  # seven steps do not fit
        ({"budget": 16, "max_num_seqs": 2, "max_num_batched_tokens": 20}, []),
    ],
    ids=str,
)
def test_what_is_timed_where_there_is_little_room(
    settings: dict[str, Any],
    sizes: list[int],
    pool: EnginePool,
    baseline: Baseline,
    prompts: list[tuple[int, ...]],
) -> None:
    """Each candidate or none: a budget that was not timed could never be chosen."""
    llm = pool.get("tree", spec={"tree_budget_adapt": True}, **settings)
    feedback = runner(llm)._budgets
    times = feedback.table.step_times if feedback is not None else {}
    assert list(times) == sizes
    wanted = set(candidates(settings["budget"], settings.get("horizon", 7)))
    assert all(set(found) == wanted for found in times.values())
    requests = [greedy(p[:20], 30) for p in prompts[:3]]
    assert_equal(generate(llm, requests), baseline(requests))


def test_tokens_while_the_budget_follows_the_batch(
    adaptive: Any, baseline: Baseline, shrinking: list[Request]
) -> None:
    """Full trees, smaller ones, chains' size and none at all, back and forth."""
    want = baseline(shrinking)
    prefer(adaptive, {1: 16, 2: 8, 3: 7, 4: 0, 5: 8, 6: 0, 7: 7, 8: 16})
    with traced(adaptive) as trace:
        assert_equal(generate(adaptive, shrinking), want)
    assert {16, 8, 7} <= set(trace.num_nodes)
    assert len(trace.num_nodes) < sum(r.options["max_tokens"] for r in shrinking)
    assert trace.longest_off_sequence >= 4


def accepted_alone(llm: Any, prompt: tuple[int, ...], company: Request) -> float:
    """Nodes a step of a request that ran beside another one, without drafts, for 60 tokens."""
    assert llm.reset_prefix_cache()
    prefer(llm, {1: 16, MAX_NUM_SEQS: 0})
    with traced(llm) as trace:
        generate(llm, [greedy(prompt, 140), company])
    alone = trace.paths[2:]  # but for a probe of both
    return sum(map(len, alone)) / len(alone)


def test_drafts_are_good_after_steps_that_drafted_nothing(
    adaptive: Any, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their context was stored all the same; without it they would be worse."""
    company = greedy(prompts[1], 60)
    good = accepted_alone(adaptive, prompts[0], company)
    monkeypatch.setattr(runner(adaptive).speculator, "_keep_context", lambda *a, **k: None)
    assert good > accepted_alone(adaptive, prompts[0], company) + 0.5


def test_the_worker_sends_its_table(adaptive: Any, shrinking: list[Request]) -> None:
    """A change in what steps cost reaches the scheduler with the outputs."""
    prefer(adaptive, dict.fromkeys(range(1, MAX_NUM_SEQS + 1), 16))
    table = runner(adaptive)._budgets.table
    for times in table.step_times.values():
        times.update({16: 1e6, 8: 1e6, 7: 1.0})
    generate(adaptive, [greedy(shrinking[0].prompt, 300)])
    assert set(scheduler(adaptive)._table[1:]) == {7}


def test_nothing_is_drafted_where_it_does_not_pay(
    adaptive: Any, baseline: Baseline, prompts: list[tuple[int, ...]]
) -> None:
    """But for one step in 64, which keeps an eye on the acceptance."""
    requests = [greedy(p, 100) for p in prompts[:2]]
    prefer(adaptive, dict.fromkeys(range(1, MAX_NUM_SEQS + 1), 0))
    with traced(adaptive) as trace:
        assert_equal(generate(adaptive, requests), baseline(requests))
    assert 1 <= len(trace.num_nodes) <= 8
    assert set(trace.num_nodes) == {16}


@pytest.mark.parametrize("budget", [8, 7])
def test_foretold_acceptance(adaptive: Any, prompts: list[tuple[int, ...]], budget: int) -> None:
    """Full trees tell what smaller ones emit: greedy, 16 prompts, within 6 %.

    Not exactly, as smaller trees leave other roots behind them.
    """
    requests = [greedy(p, 48) for p in prompts[8:24]]
    prefer(adaptive, dict.fromkeys(range(1, MAX_NUM_SEQS + 1), 16))
    counts = runner(adaptive).tree_state.node_counts
    rates = NodeRates(16)
    with traced(adaptive) as full:
        generate(adaptive, requests)
    verified = [sum(n >= node for n in full.num_nodes) for node in range(17)]
    accepted = [sum(node in (0, *path) for path in full.paths) for node in range(17)]
    rates.add(verified, accepted)
    assert counts is not None and counts.shape == (2, 17)
    assert rates.tokens(16) == pytest.approx(1 + full.mean_accepted, rel=0.01)
    prefer(adaptive, dict.fromkeys(range(1, MAX_NUM_SEQS + 1), budget))
    with traced(adaptive) as small:
        generate(adaptive, requests)
    emitted = [len(p) + 1 for p, n in zip(small.paths, small.num_nodes, strict=True) if n == budget]
    assert rates.tokens(budget) == pytest.approx(sum(emitted) / len(emitted), rel=0.06)
