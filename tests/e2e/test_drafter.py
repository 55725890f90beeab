"""What the drafter sees: the accepted sequence, however it was accepted."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    PAIR,
    Baseline,
    EnginePool,
    Request,
    assert_equal,
    generate,
    greedy,
    make_engine,
    runner,
    sampled,
    traced,
)
from oracle import oracle
from torch import Tensor

Drafts = dict[tuple[int, ...], tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def requests(prompts: list[tuple[int, ...]]) -> list[Request]:
    return [greedy(p, 48) for p in prompts[:4]] + [sampled(p, 3, 48) for p in prompts[4:6]]


@pytest.fixture
def tree(pool: EnginePool, baseline: Baseline, requests: list[Request]) -> Iterator[Any]:
    baseline(requests)
    llm = pool.get("tree")
    yield llm
    assert llm.reset_prefix_cache()


def drafts(llm: Any, requests: list[Request], want: list[Any], wrong: bool) -> Drafts:
    """The drafter's own candidates at every prefix it was asked at."""
    assert llm.reset_prefix_cache()
    with traced(llm) as trace, oracle(llm, want, wrong=wrong) as seer:
        assert_equal(generate(llm, requests), want)
    assert trace.mean_accepted == 0 if wrong else trace.mean_accepted > 2
    return seer.drafts


def largest_difference(one: Drafts, other: Drafts) -> tuple[int, float, float]:
    """Prefixes in both; largest difference of a value; share of equal best tokens."""
    common = [key for key in one if key in other]
    worst, same = 0.0, []
    for key in common:
        (ids, values), (other_ids, other_values) = one[key], other[key]
        worst = max(worst, float((values - other_values).abs().max()))
        same.append((ids[:, 0] == other_ids[:, 0]).float().mean())
    return len(common), worst, float(torch.stack(same).mean())


def test_same_drafts_however_accepted(
    tree: Any, baseline: Baseline, requests: list[Request]
) -> None:
    """One token a step, or long paths off the spine: the same candidates at the same prefix."""
    want = baseline(requests)
    one_by_one = drafts(tree, requests, want, wrong=True)
    in_leaps = drafts(tree, requests, want, wrong=False)
    count, worst, same = largest_difference(one_by_one, in_leaps)
    assert count >= 50
    assert worst < 1e-3  # logits of about 10, float32
    assert same == 1


@pytest.mark.parametrize("part", ["rows", "positions"])
def test_drafts_differ_when_rows_stay_where_they_were(
    tree: Any,
    baseline: Baseline,
    requests: list[Request],
    part: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: hidden states, or positions, of the verify step left in node order."""
    from kdtree_runner.spec_decode import speculator as module

    want = baseline(requests)
    right = drafts(tree, requests, want, wrong=True)
    put_in_sequence = runner(tree).speculator._put_in_sequence

    def only_rows(batch: Any, hidden: list[Tensor]) -> None:
        put_in_sequence(batch, hidden)
        rows = batch.logits_indices
        batch.positions[rows] = runner(tree).tree_state.row_positions[: len(rows)]

    if part == "rows":
        monkeypatch.setattr(module.ops.direct, "kv_commit", lambda *args: None)
    else:
        monkeypatch.setattr(runner(tree).speculator, "_put_in_sequence", only_rows)
    _, worst, same = largest_difference(right, drafts(tree, requests, want, wrong=False))
    assert worst > 0.1
    assert same < 1


@pytest.mark.parametrize("name", ["fc.weight", "layers.2.self_attn.k_proj.weight", "norm.weight"])
def test_a_drafter_that_lacks_weights_is_refused(
    pool: EnginePool, tmp_path: Path, name: str
) -> None:
    """vLLM would serve it, with uninitialised weights and drafts that are never right."""
    from safetensors.torch import load_file, save_file

    from kdtree_runner.config import UnsupportedError

    pool.get("tree")  # an engine that fails leaves the process's groups as they were
    folder = tmp_path / "drafter"
    shutil.copytree(PAIR / "drafter", folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    del weights[name]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(UnsupportedError, match=rf"weights of the drafter.*no {re.escape(name)} \("):
        make_engine("tree", spec={"model": str(folder)})
