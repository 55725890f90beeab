"""Bitwise-lossless mode at length: whatever the batch, the budget and the ranks, the same tokens.

Needs vLLM's CUDA wheel, and for two ranks two GPUs and Ray. A few minutes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import (
    EnginePool,
    Request,
    assert_equal,
    generate,
    generate_one_by_one,
    greedy,
    load_prompts,
    metric,
    sampled,
)

from . import lossless

pytestmark = lossless.MARKS

NUM_GPUS = torch.cuda.device_count()
BATCH = 32
NUM_PROMPTS, MAX_TOKENS = 64, 256
ALONE = 4  # requests of each kind that run by themselves
SETTINGS: dict[str, Any] = lossless.SETTINGS | {
    "max_model_len": 1024,
    "max_num_seqs": BATCH,
    "kv_cache_memory_bytes": 2 << 30,
    "enforce_eager": False,
    "compilation_config": lossless.GRAPHS,
}
RANKS: dict[int, dict[str, Any]] = {
    1: {},
    2: {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
}


def requests() -> tuple[list[Request], list[Request]]:
    """Greedy ones and seeded ones."""
    prompts = load_prompts()[:NUM_PROMPTS]
    return (
        [greedy(p, MAX_TOKENS) for p in prompts],
        [sampled(p, seed=i, max_tokens=MAX_TOKENS) for i, p in enumerate(prompts)],
    )


@pytest.mark.parametrize(
    "ranks",
    [1, pytest.param(2, marks=pytest.mark.skipif(NUM_GPUS < 2, reason="fewer than two GPUs"))],
)
def test_every_budget_and_batch_gives_the_baselines_tokens(ranks: int) -> None:
    kinds = requests()
    pool = EnginePool(capacity=1)
    try:
        plain = pool.get("plain", attention_backend="KDTREE_MLA", **SETTINGS, **RANKS[ranks])
        want = [generate(plain, kind) for kind in kinds]
        for kind, outputs in zip(kinds, want, strict=True):  # the baseline keeps its own promise
            assert_equal(generate_one_by_one(plain, kind[:ALONE]), outputs[:ALONE])
        for budget in (8, 16, 32):
            llm = pool.get("tree", budget=budget, **SETTINGS, **RANKS[ranks])
            for kind, outputs in zip(kinds, want, strict=True):
                assert_equal(generate(llm, kind), outputs)
                # Now with the prompts in the prefix cache.
                assert_equal(generate_one_by_one(llm, kind[:ALONE]), outputs[:ALONE])
            assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
    finally:
        pool.close()
