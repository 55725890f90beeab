"""build_candidates against plain Python: the best tokens, and exact sums of exponentials."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from .candidates import candidates, expected_candidates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 2, 7, 127, 128, 129, 1000, 4099])
@pytest.mark.parametrize("topk", [1, 5, 64])
def test_candidates(dtype: torch.dtype, vocab: int, topk: int) -> None:
    logits = (torch.randn(3, vocab) * 4).to(dtype)
    values, ids, _ = candidates(logits, topk, vocab_offset=1000)
    for row in range(3):
        want = expected_candidates(logits[row], topk)
        assert values[row].tolist() == [x for x, _ in want]
        assert ids[row].tolist() == [i + 1000 if i >= 0 else -1 for _, i in want]


def test_candidates_of_a_strided_view_do_not_read_the_rest() -> None:
    whole = torch.full((6, 500), torch.inf)
    logits = whole[1::2, 3:400]
    logits.copy_(torch.randn(3, 397))
    assert not logits.is_contiguous()
    for got, want in zip(candidates(logits, 9), candidates(logits.contiguous(), 9), strict=True):
        assert torch.equal(got, want)


def test_equal_logits_go_by_token_id() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 1::2] = -0.0
    values, ids, _ = candidates(logits, 64)
    assert ids[0].tolist() == list(range(64))
    few = torch.randint(-2, 3, (4, 1000)).float()
    values, ids, _ = candidates(few, 64)
    for row in range(4):
        want = expected_candidates(few[row], 64)
        assert list(zip(values[row].tolist(), ids[row].tolist(), strict=True)) == want


def test_nan_and_minus_infinity_are_no_candidates() -> None:
    logits = torch.full((3, 200), -torch.inf)
    logits[0, [5, 150]] = torch.tensor([torch.nan, 2.0])
    logits[1] = torch.nan
    logits[2, 7] = torch.inf
    values, ids, lse = candidates(logits, 3)
    assert ids.tolist() == [[150, -1, -1], [-1, -1, -1], [7, -1, -1]]
    assert values.tolist() == [
        [2.0, -torch.inf, -torch.inf],
        [-torch.inf] * 3,
        [torch.inf] + [-torch.inf] * 2,
    ]
    assert lse[1].tolist() == [2**31, 0, 0]  # INT32_MIN, then zeros


def sum_of_exponentials(lse: list[int]) -> Fraction:
    """What a kdtree_lse stands for, exactly. lse: its three words."""
    head, high, low = (word % 2**64 for word in lse)
    group = (head % 2**32 ^ 2**31) - 2**31
    high += (head >> 32) % 2**16 << 64
    low += (head >> 48) << 64
    return (high * 2**40 + low) * Fraction(2) ** (40 * (group - 1) - 22)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale, shift", [(0.01, 0), (1, -50), (5, 13.37), (20, 0), (3, 57)])
def test_log_sum_exp(dtype: torch.dtype, scale: float, shift: float) -> None:
    logits = (torch.randn(4, 5000) * scale + shift).clamp(-60, 60).to(dtype)
    _, _, lse = candidates(logits, 1)
    for row in range(4):
        got = math.log(sum_of_exponentials(lse[row].tolist()))
        assert got == pytest.approx(torch.logsumexp(logits[row].double(), 0).item(), abs=1e-6)


@pytest.mark.parametrize("gap", [20.0, 27.7, 40.0])
def test_log_sum_exp_of_a_peak_over_many(gap: float) -> None:
    """The largest term may be the smallest of its group: what lies below must not be lost."""
    for top in torch.arange(-30, 60, 1.7).tolist():
        logits = torch.full((1, 20000), top - gap)
        logits[0, 5] = top
        _, _, lse = candidates(logits, 1)
        got = math.log(sum_of_exponentials(lse[0].tolist()))
        assert got == pytest.approx(torch.logsumexp(logits.double(), 1).item(), abs=1e-6)


def test_log_sum_exp_does_not_depend_on_order() -> None:
    logits = torch.randn(1, 3000) * 30
    _, _, want = candidates(logits, 1)
    for _ in range(5):
        assert torch.equal(candidates(logits[:, torch.randperm(3000)], 1)[2], want)
