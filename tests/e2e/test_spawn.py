"""examples/offline.py in spawned processes, as a plain script runs it, and through `mp`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from engines import Baseline, Request, greedy, sampled, tokens
from processes import run_example

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def requests(prompts: list[tuple[int, ...]]) -> Sequence[Request]:
    """Greedy and seeded requests that share their batches."""
    seeded = [sampled(p, seed=i, max_tokens=32) for i, p in enumerate(prompts[4:8])]
    return [*(greedy(p, max_tokens=32) for p in prompts[:4]), *seeded]


def test_offline_example(baseline: Baseline, requests: Sequence[Request], tmp_path: Path) -> None:
    answer, printed = run_example("offline.py", requests, tmp_path)
    assert answer["tokens"] == [tokens(o) for o in baseline(requests)]
    assert "def main():" in printed
    steps = [line for line in printed.splitlines() if line.endswith("tokens a step and request")]
    assert float(steps[0].split()[0]) > 2  # the plain engine has 1


def test_tensor_parallel(baseline: Baseline, requests: Sequence[Request], tmp_path: Path) -> None:
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    answer, _ = run_example("offline.py", requests, tmp_path, **parallel)
    assert answer["tokens"] == [tokens(o) for o in baseline(requests)]
    assert len(answer["states"]) == 2
    assert len(set(answer["states"])) == 1, "the ranks grew different trees"
    assert answer["backend"] == "mp"
