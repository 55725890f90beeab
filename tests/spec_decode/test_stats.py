"""Acceptance statistics."""

from __future__ import annotations

import json

import pytest

from kdtree_runner.spec_decode.stats import AcceptanceStats

LENGTHS = [0, 3, 1, 1]  # accepted nodes of four drafts


def test_rates_of_a_known_run() -> None:
    stats = AcceptanceStats.from_lengths(LENGTHS, num_nodes=8)
    assert stats == AcceptanceStats(4, 32, 5, (3, 1, 1))
    assert stats.mean_accepted == 1.25
    assert stats.tokens_per_step == 2.25
    assert stats.mean_nodes == 8
    assert stats.acceptance_rate == 5 / 32
    assert stats.rate_per_pos == [0.75, 0.25, 0.25]
    assert stats.step_rate_per_pos == [0.75, 1 / 3, 1.0]


def test_readings_add_and_subtract() -> None:
    early = AcceptanceStats.from_lengths(LENGTHS[:1], num_nodes=8)
    late = AcceptanceStats.from_lengths(LENGTHS, num_nodes=8)
    assert late - early == AcceptanceStats.from_lengths(LENGTHS[1:], num_nodes=8)
    assert (late - early) + early == late


def test_nothing_drafted_has_no_rates() -> None:
    stats = AcceptanceStats()
    assert stats.tokens_per_step == stats.mean_accepted == stats.acceptance_rate == 0
    assert stats.rate_per_pos == stats.step_rate_per_pos == []
    assert AcceptanceStats(0, 0, 0, (0, 0)).step_rate_per_pos == [0, 0]


def test_report_is_json() -> None:
    stats = AcceptanceStats.from_lengths(LENGTHS, num_nodes=8)
    report = json.loads(json.dumps(stats.to_dict()))
    assert report["num_accepted_per_pos"] == [3, 1, 1]
    assert report["tokens_per_step"] == stats.tokens_per_step


@pytest.mark.parametrize(
    ("counters", "message"),
    [
        ((-1, 0, 0), "counters must be at least 0"),
        ((1, 4, 2, (2, -1)), "counters must be at least 0"),
        ((1, 4, 5), r"num_accepted_tokens must be at most num_draft_tokens \(4\), got 5"),
    ],
)
def test_impossible_counters_are_refused(counters: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AcceptanceStats(*counters)
