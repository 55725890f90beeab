"""Whatever settings, arrivals and budgets come together: plain decoding's tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from engines import (
    Baseline,
    EnginePool,
    Request,
    assert_equal,
    greedy,
    metric,
    runner,
    sampled,
)

MAX_MODEL_LEN = 120  # short: many requests end at it
ROUNDS, NUM_REQUESTS = 3, 8
LAST_ARRIVAL = 40  # step


def draw_settings(rng: random.Random) -> dict[str, Any]:
    """Of one engine. Widths of trees are what prompts may be cut to, too."""
    budget, horizon = rng.choice([2, 8, 16, 64]), rng.choice([2, 4, 7])
    widths = [1 + budget, 1 + budget // 2]
    settings: dict[str, Any] = {
        "budget": budget,
        "horizon": horizon,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": rng.choice([2, 3, 8]),
        "async_scheduling": rng.random() < 0.7,
        "enable_prefix_caching": rng.random() < 0.7,
        "long_prefill_token_threshold": rng.choice([0, *widths]),
        "spec": {"tree_budget_adapt": True},
    }
    if rng.random() < 0.5:
        settings["max_num_batched_tokens"] = rng.choice([80, 128])
    if rng.random() < 0.5:  # some requests are preempted
        settings["num_gpu_blocks_override"] = (2 * MAX_MODEL_LEN + budget) // 16
    if rng.random() < 0.3:
        by_batch = [[1, 1, budget], [2, 3, 0], [4, 8, budget // 2]]
        settings["spec"] = {"num_speculative_tokens_per_batch_size": by_batch}
    return settings


def draw_request(
    rng: random.Random, prompts: Sequence[tuple[int, ...]], widths: Sequence[int]
) -> Request:
    """A prompt of any length, greedy or seeded, now and then drafted as a chain."""
    length = rng.choice([1, *widths, rng.randrange(1, MAX_MODEL_LEN), MAX_MODEL_LEN - 2])
    prompt = rng.choice(prompts)[:length]
    options: dict[str, Any] = rng.choice(
        [{}, {}, {}, {"frequency_penalty": 1.0}, {"stop_token_ids": [17, 11]}, {"min_tokens": 2}]
    )
    max_tokens = rng.choice([2, 5, 20, 50, MAX_MODEL_LEN])
    if rng.random() < 0.5:
        return greedy(prompt, max_tokens, **options)
    return sampled(prompt, rng.randrange(1000), max_tokens, **options)


def let_budgets_jump(llm: Any, rng: random.Random) -> None:
    """Draw every batch size's budget anew, whenever the worker looks at the counts."""
    if runner(llm)._budgets is None:
        return
    table, choices = runner(llm)._budgets.table, runner(llm)._candidates()

    def update(*_: Any) -> bool:
        table.budgets[1:] = [rng.choice(choices) for _ in table.budgets[1:]]
        return True

    table.update = update


def generate_staggered(llm: Any, requests: Sequence[Request], arrivals: Sequence[int]) -> list[Any]:
    """The last RequestOutput of each request. arrivals: the step before which each is submitted."""
    from vllm import SamplingParams

    engine, outputs = llm.llm_engine, {}
    waiting = sorted(range(len(requests)), key=arrivals.__getitem__, reverse=True)
    names: dict[str, int] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and arrivals[waiting[-1]] <= step:
            i = waiting.pop()
            names[name := f"{id(requests)}-{i}"] = i
            prompt = {"prompt_token_ids": list(requests[i].prompt)}
            engine.add_request(name, prompt, SamplingParams(**requests[i].options))
        for output in engine.step():
            outputs[names[output.request_id]] = output
        step += 1
    return [outputs[i] for i in range(len(requests))]


@pytest.mark.parametrize("seed", [0, 1, 3, 5])
def test_any_schedule_gives_the_baselines_tokens(
    seed: int,
    pool: EnginePool,
    baseline: Baseline,
    prompts: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(seed)
    settings = draw_settings(rng)
    widths = [1 + settings["budget"], 1 + settings["budget"] // 2]
    rounds = [
        [draw_request(rng, prompts, widths) for _ in range(NUM_REQUESTS)] for _ in range(ROUNDS)
    ]
    want = [baseline(requests, max_model_len=MAX_MODEL_LEN) for requests in rounds]
    llm = pool.get("tree", **settings)
    monkeypatch.setattr("kdtree_runner.spec_decode.budget.UPDATE_STEPS", 2)
    let_budgets_jump(llm, rng)
    for requests, outputs in zip(rounds, want, strict=True):
        arrivals = [rng.choice([0, rng.randrange(LAST_ARRIVAL)]) for _ in requests]
        assert_equal(generate_staggered(llm, requests, arrivals), outputs)
    assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
