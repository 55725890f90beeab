"""Bitwise-lossless mode at length: whatever the batch, the budget and the ranks, the same tokens.

Needs vLLM's CUDA wheel, and for two ranks two GPUs and Ray. A few minutes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

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

NUM_GPUS = torch.cuda.device_count()
HAS_VLLM = NUM_GPUS > 0 and importlib.util.find_spec("vllm") is not None
if HAS_VLLM:  # nowhere else: the other tests' engines start in the same process
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_VLLM, reason="no vLLM for CUDA"),
]

BATCH = 32
NUM_PROMPTS, MAX_TOKENS = 64, 256
ALONE = 4  # requests of each kind that run by themselves
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_seqs": BATCH,
    "kv_cache_memory_bytes": 2 << 30,
    "gpu_memory_utilization": 0.1,  # others may use the card too
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
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
