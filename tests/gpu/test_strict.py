"""Bitwise-lossless mode at length: whatever the batch, the budget and the ranks, the same tokens.

Needs vLLM's CUDA wheel, two minutes. For two ranks Ray, two GPUs without other work (engines of two
ranks that share cards wait for each other's exchanges), and a quarter of an hour.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    PAIR,
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

from kdtree_runner.cli.main import main

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
TWO_RANKS = ["--tensor-parallel-size", "2", "--executor", "ray"]


def requests() -> tuple[list[Request], list[Request]]:
    """Greedy ones and seeded ones."""
    prompts = load_prompts()[:NUM_PROMPTS]
    return (
        [greedy(p, MAX_TOKENS) for p in prompts],
        [sampled(p, seed=i, max_tokens=MAX_TOKENS) for i, p in enumerate(prompts)],
    )


def test_every_budget_and_batch_gives_the_baselines_tokens() -> None:
    kinds = requests()
    pool = EnginePool(capacity=1)
    try:
        plain = pool.get("plain", attention_backend="KDTREE_MLA", **SETTINGS)
        want = [generate(plain, kind) for kind in kinds]
        for kind, outputs in zip(kinds, want, strict=True):  # the baseline keeps its own promise
            assert_equal(generate_one_by_one(plain, kind[:ALONE]), outputs[:ALONE])
        for budget, adapts in ((8, False), (16, False), (32, False), (32, True)):
            spec = {"tree_budget_adapt": adapts}
            llm = pool.get("tree", budget=budget, spec=spec, **SETTINGS)
            for kind, outputs in zip(kinds, want, strict=True):
                assert_equal(generate(llm, kind), outputs)
                # Now with the prompts in the prefix cache.
                assert_equal(generate_one_by_one(llm, kind[:ALONE]), outputs[:ALONE])
            assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
    finally:
        pool.close()


@pytest.mark.skipif(NUM_GPUS < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("budgets", "adapts"), [("8,16,32", False), ("32", True)])
def test_two_ranks_give_the_tokens_of_two_ranks(
    budgets: str, adapts: bool, temperature: int, tmp_path: Path
) -> None:
    """Over Ray, each engine in a process of its own; at batch 32, and the first prompts alone."""

    def check(batch: int, prompts: int) -> list[list[int]]:
        report = verify_two_ranks(
            tmp_path / f"{batch}.json",
            *("--batch-size", str(batch), "--num-prompts", str(prompts)),
            *("--tree-budget", budgets, "--tree-args", json.dumps({"tree_budget_adapt": adapts})),
            *("--max-tokens", str(MAX_TOKENS), "--temperature", str(temperature)),
        )
        found = report["comparisons"]
        assert {k: c["equal"] for k, c in found.items()} == dict.fromkeys(found, prompts)
        assert len(found) == budgets.count(",") + 1
        return [prompt["runs"]["plain"]["token_ids"] for prompt in report["prompts"]]

    assert check(BATCH, NUM_PROMPTS)[:ALONE] == check(1, ALONE)


def verify_two_ranks(report: Path, *flags: str) -> dict[str, Any]:
    """The report of `kdtree verify --strict`, which has to find everything equal."""
    status = main(
        [
            *("verify", "--strict", *TWO_RANKS, *flags, "--json", str(report)),
            *("--model", str(PAIR / "target"), "--drafter", str(PAIR / "drafter")),
            *("--dtype", "bfloat16", "--max-model-len", str(SETTINGS["max_model_len"])),
            *("--gpu-memory-utilization", str(SETTINGS["gpu_memory_utilization"])),
            *("--kv-cache-gib", "2"),
            *("--engine-args", json.dumps({"compilation_config": lossless.GRAPHS})),
        ]
    )
    assert status == 0
    return dict(json.loads(report.read_text()))
