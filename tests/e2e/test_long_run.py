"""Hundreds of requests leave nothing behind."""

from __future__ import annotations

import gc
from typing import Any

import torch
from engines import (
    Baseline,
    EnginePool,
    Request,
    assert_equal,
    generate,
    runner,
    sampled,
    scheduler,
)

NUM_REQUESTS = 320


def leftovers(llm: Any) -> dict[str, int]:
    """What would grow if a request left something behind."""
    generate(llm, [sampled((5, 6, 7), 0, 1)])  # vLLM frees a finished request in the next step
    gc.collect()
    states, schedule = runner(llm).req_states, scheduler(llm)
    return {
        "tensors": sum(isinstance(o, torch.Tensor) for o in gc.get_objects()),
        "slots taken": states.num_reqs,
        "slots free": len(states.free_indices),
        "requests": len(schedule.requests) + len(schedule.running) + len(schedule.waiting),
        "blocks free": schedule.kv_cache_manager.block_pool.get_num_free_blocks(),
        "outputs": len(llm.llm_engine.output_processor.request_states),
    }


def short_requests(prompts: list[tuple[int, ...]], first: int, count: int) -> list[Request]:
    """Prompts of 6 to 20 tokens and 1 to 4 tokens to say, all kinds in turn."""
    kinds: list[dict[str, Any]] = [
        {},
        {"logprobs": 1},
        {"temperature": 0.9},
    ]
    requests = []
    for i in range(first, first + count):
        prompt = prompts[i % len(prompts)][: 6 + i % 15]
        requests.append(sampled(prompt, i, 1 + i % 4, **({"temperature": 0.0} | kinds[i % 3])))
    return requests


def test_many_requests(
    pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]
) -> None:
    last = short_requests(prompts, NUM_REQUESTS, 16)
    want = baseline(last)
    llm = pool.get("tree")
    generate(llm, short_requests(prompts, 0, 24))  # what is made once and kept
    before = leftovers(llm)
    assert before["slots taken"] <= 1
    assert before["requests"] == before["outputs"] == 0
    outputs = generate(llm, short_requests(prompts, 24, NUM_REQUESTS - 24))
    assert all(o.finished for o in outputs)
    del outputs
    assert_equal(generate(llm, last), want)
    after = leftovers(llm)
    assert after.pop("tensors") <= before.pop("tensors") + 10
    assert after == before
