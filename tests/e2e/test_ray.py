"""examples/ray_tp.py: tensor parallel 2 through Ray gives the tokens of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import Baseline, greedy, sampled, tokens
from processes import run_example

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


def test_ray_example(baseline: Baseline, prompts: list[tuple[int, ...]], tmp_path: Path) -> None:
    seeded = [sampled(p, seed=i, max_tokens=32) for i, p in enumerate(prompts[4:8])]
    requests = [*(greedy(p, max_tokens=32) for p in prompts[:4]), *seeded]
    answer, printed = run_example("ray_tp.py", requests, tmp_path)
    assert answer["tokens"] == [tokens(o) for o in baseline(requests)]
    assert len(answer["states"]) == 2
    assert len(set(answer["states"])) == 1, "the ranks grew different trees"
    # vLLM's library has these for processors with AVX-512 alone.
    shared_memory = hasattr(torch.ops._C, "init_shm_manager")
    link = "_CPUSHMDistributed" if shared_memory else "torch.distributed"
    assert {place["link"] for place in answer["places"]} == {link}
    assert answer["backend"] == "CpuRayExecutor"
    assert "def read_lines(path):" in printed
