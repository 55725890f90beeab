"""DDTree in vLLM on a GPU, in batch-invariant mode: the baseline's tokens, and a step never waits.

Needs vLLM's CUDA wheel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from engines import (
    EnginePool,
    assert_equal,
    generate,
    greedy,
    load_prompts,
    runner,
    sampled,
    scheduler,
)

from . import lossless

pytestmark = lossless.MARKS
SETTINGS = lossless.SETTINGS | {"kv_cache_memory_bytes": 1 << 30}


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    engines = EnginePool(capacity=2)
    yield engines
    engines.close()


@pytest.fixture(scope="module")
def get(pool: EnginePool) -> Callable[..., Any]:
    """An engine by mode, captured or eager."""

    def make(mode: str, graphs: bool, **settings: Any) -> Any:
        how = {"enforce_eager": False, "compilation_config": lossless.GRAPHS} if graphs else {}
        if mode != "tree":
            how["attention_backend"] = "KDTREE_MLA"
        else:
            settings.setdefault("spec", {"tree_budget_adapt": False})
        return pool.get(mode, **SETTINGS, **how, **settings)  # type: ignore[arg-type]

    return make


def requests(seeded: bool) -> list[Any]:
    prompts = load_prompts()[:16]
    if seeded:
        return [sampled(p, seed=i, max_tokens=64) for i, p in enumerate(prompts)]
    return [greedy(p, max_tokens=64) for p in prompts]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("budget", [8, 16, 31])
def test_tokens_are_the_baselines(get: Callable[..., Any], graphs: bool, budget: int) -> None:
    asked = requests(seeded=False) + requests(seeded=True)
    want = generate(get("plain", graphs), asked)
    assert_equal(generate(get("tree", graphs, budget=budget), asked), want)


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_tokens_do_not_depend_on_the_cuts_of_prompts(get: Callable[..., Any], mode: str) -> None:
    """Whole prompts, chunks of a few pages beside drafts, and prefixes from the cache."""
    asked = requests(seeded=False) + requests(seeded=True)
    want = generate(get("plain", True), asked)
    llm = get(mode, True, max_num_batched_tokens=160)
    for _ in range(2):
        assert_equal(generate(llm, asked), want)
    assert llm.reset_prefix_cache()


def test_tokens_while_trees_shrink_with_the_batch(get: Callable[..., Any]) -> None:
    """Every width has its graphs, and every one gives the baseline's tokens."""
    asked = [
        sampled(p, seed=i, max_tokens=16 + 10 * i) if i % 2 else greedy(p, 16 + 10 * i)
        for i, p in enumerate(load_prompts()[:8])
    ]
    want = generate(get("plain", True), asked)
    llm = get("tree", True, spec={})  # the default
    table = runner(llm)._budgets.table
    assert list(table.step_times) == [1, 2, 4, 8]
    assert all(0 < t < 1 for times in table.step_times.values() for t in times.values())
    manager = runner(llm).cudagraph_manager
    for width in (17, 9, 8, 1):
        for num_reqs in range(1, 9):
            found = manager.dispatch(num_reqs, num_reqs * width, width, 0)
            assert found.cg_mode.name == "FULL", (num_reqs, width)
    saved = scheduler(llm)._table
    scheduler(llm)._table = [0, 16, 8, 7, 0, 8, 0, 7, 16]
    try:
        assert_equal(generate(llm, asked), want)
    finally:
        scheduler(llm)._table = saved


@pytest.mark.parametrize("graphs", [False, True])
def test_no_step_waits(
    get: Callable[..., Any], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither vLLM's part of a step nor ours reads a value of the device."""
    llm = get("tree", graphs)
    asked = requests(seeded=False)[:4] + requests(seeded=True)[:4]
    generate(llm, asked)  # whatever is compiled or allocated lazily
    steps = 0

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    for name in ("execute_model", "sample_tokens"):
        monkeypatch.setattr(runner(llm), name, watched(getattr(runner(llm), name)))
    generate(llm, asked)
    assert steps > 20


def test_every_batch_has_its_graph(get: Callable[..., Any]) -> None:
    """Uniform batches of trees of any size replay a full graph, and so does each draft."""
    llm = get("tree", True)
    manager, drafter = runner(llm).cudagraph_manager, runner(llm).speculator.query_cudagraph_manager
    for num_reqs in range(1, 9):
        for graphs, width in ((manager, 17), (drafter, 8)):
            found = graphs.dispatch(num_reqs, num_reqs * width, width, 0)
            assert found.cg_mode.name == "FULL", (num_reqs, width)
