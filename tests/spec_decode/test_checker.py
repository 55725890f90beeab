"""The output checker: each grade, the control, exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kdtree_runner.spec_decode.checker import Comparison, compare, report

EPSILON = 0.1


def record(tokens: list[int], finish: str | None = "length", **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": [1, 2], "token_ids": tokens, "finish_reason": finish, **more}


def grade(baseline: dict[str, Any], candidate: dict[str, Any]) -> Comparison:
    (comparison,) = compare([baseline], [candidate], EPSILON).comparisons
    return comparison


def test_equal() -> None:
    assert grade(record([5, 6, 7]), record([5, 6, 7])) == Comparison(0, "equal", 3)
    assert grade(record([], None), record([], None)) == Comparison(0, "equal", 0)


def test_tie_below_epsilon_shows_its_gap() -> None:
    baseline = record([5, 6, 7, 8], top_gap=[0.0, 2.0, 0.09, 0.0])
    found = grade(baseline, record([5, 6, 9]))
    assert found == Comparison(0, "tie", 2, "tokens differ, gap 0.09", 7, 9, 0.09)


@pytest.mark.parametrize("gap", [EPSILON, 3.0])
def test_a_difference_at_a_clear_gap_is_divergent(gap: float) -> None:
    # Only the gap at the first difference counts: later ones follow from it.
    found = grade(record([5, 6, 7], top_gap=[0.0, gap, 0.0]), record([5, 8, 9]))
    assert (found.grade, found.num_equal, found.gap) == ("divergent", 1, gap)


@pytest.mark.parametrize("more", [{}, {"top_gap": [None, None]}, {"top_gap": None}])
def test_an_unknown_gap_excuses_nothing(more: dict[str, Any]) -> None:
    # So it is with seeded sampling unless the gap of the noised scores was recorded.
    found = grade(record([5, 6], **more), record([5, 7]))
    assert (found.grade, found.gap, found.reason) == (
        "divergent",
        None,
        "tokens differ, gap unknown",
    )


def test_the_candidates_gap_excuses_nothing() -> None:
    assert grade(record([5, 6]), record([5, 7], top_gap=[0.0, 0.0])).grade == "divergent"


@pytest.mark.parametrize(
    ("baseline", "candidate", "tokens"),
    [
        (record([5, 6]), record([5, 6, 7]), (None, 7)),
        (record([5, 6, 7], top_gap=[0.0] * 3), record([5, 6]), (7, None)),
        (record([5, 6], "length"), record([5, 6], "stop"), (None, None)),
        (record([], "abort"), record([5]), (None, 5)),
    ],
)
def test_another_end_is_divergent_unless_explained(
    baseline: dict[str, Any], candidate: dict[str, Any], tokens: tuple[int | None, int | None]
) -> None:
    found = grade(baseline, candidate)
    shorter = min(len(baseline["token_ids"]), len(candidate["token_ids"]))
    assert (found.grade, found.num_equal) == ("divergent", shorter)
    assert (found.baseline_token, found.candidate_token) == tokens
    assert f"after {len(candidate['token_ids'])} tokens" in found.reason
    for explained in ({"explained": "fewer tokens asked"}, {}), ({}, {"explained": "aborted"}):
        found = grade({**baseline, **explained[0]}, {**candidate, **explained[1]})
        assert found.grade == "equal"
        assert found.reason.endswith(("fewer tokens asked", "aborted"))


def test_an_explanation_does_not_excuse_a_token() -> None:
    found = grade(record([5, 6]), record([5, 7, 8], explained="more tokens asked"))
    assert found.grade == "divergent"


def three_prompts(last_gap: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """An equal prompt, a tie at gap 0.05 and a difference at `last_gap`."""
    baseline = [record([1]), record([1], top_gap=[0.05]), record([1], top_gap=[last_gap])]
    return baseline, [record([1]), record([2]), record([2])]


@pytest.mark.parametrize(
    ("last_gap", "counts", "exit_code", "strict_exit_code"),
    [(0.5, (1, 1, 1), 1, 1), (0.06, (1, 2, 0), 0, 1)],
)
def test_summary_counts_and_exit_codes(
    last_gap: float, counts: tuple[int, int, int], exit_code: int, strict_exit_code: int
) -> None:
    summary = compare(*three_prompts(last_gap), EPSILON)
    assert tuple(summary.count(g) for g in ("equal", "tie", "divergent")) == counts
    assert summary.exit_code() == exit_code
    assert summary.exit_code(strict=True) == strict_exit_code
    assert summary.noise_floor == last_gap


def test_equal_runs_pass_strictly_and_empty_runs_never() -> None:
    same = compare([record([1, 2])], [record([1, 2])], 0.0)
    assert same.exit_code(strict=True) == 0
    assert compare([], [], 0.0).exit_code() == 2


def test_epsilon_zero_calls_nothing_a_tie() -> None:
    summary = compare([record([1], top_gap=[0.0])], [record([2])], 0.0)
    assert summary.count("divergent") == 1


def test_report_is_json_and_has_a_control() -> None:
    baseline, other = three_prompts(0.5)
    candidate = compare(baseline, baseline, EPSILON)
    control = compare(baseline, other, EPSILON)
    found = json.loads(json.dumps(report(candidate, control, strict=True), allow_nan=False))
    assert (found["epsilon"], found["strict"], found["exit_code"]) == (EPSILON, True, 0)
    assert found["candidate"]["equal"] == found["candidate"]["tokens_equal"] == 3
    assert found["candidate"]["differences"] == []
    assert found["control"]["exit_code"] == 1
    assert found["control"]["noise_floor"] == 0.5
    assert [d["index"] for d in found["control"]["differences"]] == [1, 2]
    assert "control" not in report(candidate)


def test_a_control_by_another_epsilon_is_refused() -> None:
    run = [record([1])]
    with pytest.raises(ValueError, match=r"epsilon of the control must be the candidate's 0\.1"):
        report(compare(run, run, EPSILON), compare(run, run, 0.2))


@pytest.mark.parametrize(
    ("baseline", "candidate", "epsilon", "message"),
    [
        ([record([1])], [], 0.1, "candidate must have 1 records, got 0"),
        ([record([1])], [record([1])], -1.0, "epsilon must be at least 0, got -1.0"),
        ([record([1])], [record([1])], float("nan"), "epsilon must be at least 0, got nan"),
        ([record([1], top_gap=[])], [record([1])], 0.1, "record 0 must have 1 gaps, got 0"),
        ([record([1], top_gap=[-1.0])], [record([1])], 0.1, "finite and >= 0, got -1.0"),
        ([record([1], top_gap=[float("inf")])], [record([1])], 0.1, "finite and >= 0, got inf"),
        (
            [record([1])],
            [record([1]) | {"prompt_token_ids": [9]}],
            0.1,
            "prompt_token_ids of record 0 must be the baseline's",
        ),
    ],
)
def test_bad_input_is_refused(
    baseline: list[Any], candidate: list[Any], epsilon: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compare(baseline, candidate, epsilon)
