"""examples/offline.py in spawned processes, as a plain script runs it, and through `mp`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from engines import PAIR, Baseline, Request, greedy, sampled, tokens
from processes import run_example

pytestmark = pytest.mark.slow
VOCAB = 2048  # tokens of the miniature pair


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


PARALLEL = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def test_tensor_parallel(baseline: Baseline, requests: Sequence[Request], tmp_path: Path) -> None:
    answer, _ = run_example("offline.py", requests, tmp_path, **PARALLEL)
    assert answer["tokens"] == [tokens(o) for o in baseline(requests)]
    assert len(answer["states"]) == 2
    assert len(set(answer["states"])) == 1, "the ranks grew different trees"
    assert answer["backend"] == "mp"
    # Sampled requests need whole rows: the negative control of the next test.
    assert any(shape[-1] >= VOCAB // 2 for shape in answer["gathered"][0])


def test_greedy_ranks_exchange_no_logits(
    baseline: Baseline, prompts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """From prompt to end: a key for each row of the target, K candidates for a drafted one."""
    requests = [greedy(p, max_tokens=32) for p in prompts[:4]]
    answer, _ = run_example("offline.py", requests, tmp_path, **PARALLEL)
    assert answer["tokens"] == [tokens(o) for o in baseline(requests)]
    keys = {2 * rows for rows in range(1, 4 * 17 + 1)}  # int64, sent as two float32
    drafts = {4 * 7 * (6 + 2 * 16), 3 * 7 * 38, 2 * 7 * 38, 7 * 38}  # log-sum-exp, values, ids
    for shapes in answer["gathered"]:
        sizes = {size for (size,) in shapes}  # all of one dimension
        assert sizes & keys and sizes & drafts
        assert sizes <= keys | drafts


def test_ranks_whose_budgets_follow_the_batch(
    baseline: Baseline, prompts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """Each rank times its steps; the first one's table alone decides, for all."""
    requests = [greedy(p, max_tokens=60 + 40 * i) for i, p in enumerate(prompts[:4])]
    spec = {
        "method": "ddtree",
        "model": str(PAIR / "drafter"),
        "tree_budget": 16,
        "tree_budget_adapt": True,
    }
    answer, _ = run_example(
        "offline.py", requests, tmp_path, speculative_config=spec, max_num_seqs=4, **PARALLEL
    )
    assert answer["tokens"] == [tokens(o) for o in baseline(requests)]
    assert len(answer["states"]) == 2
    assert len(set(answer["states"])) == 1, "the ranks grew different trees"
