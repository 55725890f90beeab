"""Is the speculative output the baseline's? Two runs over the same prompts, token by token.

Every prompt gets a grade:

equal: same tokens, same finish reason.
tie: at the first difference the baseline's two best tokens were closer than epsilon, so that the
    choice hung on rounding. What follows such a difference cannot be compared.
divergent: anything else. A gap that was not recorded excuses nothing.

A record is a mapping with
    prompt_token_ids: list of int;
    token_ids: list of int, the emitted tokens;
    finish_reason: str or None;
    top_gap: optional list, one entry an emitted token: by how much the best token's log-probability
        led the second best's there, None where unknown or where there was no second. Of a sampled
        run it must be the gap of what the token was chosen by (with the noise added), or be left
        out;
    explained: optional str, why this request ended elsewhere than the other run's, for example that
        it was given fewer tokens. It excuses a different end, never a different token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Record = Mapping[str, Any]
Grade = Literal["equal", "tie", "divergent"]


@dataclass(frozen=True)
class Comparison:
    """One prompt's result.

    num_equal: length of the common prefix in tokens; at a difference also its position.
    reason: what differs, and why it is excused; empty where nothing differs.
    baseline_token, candidate_token: the first that differ, None past the end of an output.
    gap: the baseline's at the first difference, None where there is none or it is unknown.
    """

    index: int
    grade: Grade
    num_equal: int
    reason: str = ""
    baseline_token: int | None = None
    candidate_token: int | None = None
    gap: float | None = None


@dataclass(frozen=True)
class Summary:
    """All prompts of one run against the baseline.

    epsilon: gap below which a difference is a tie.
    """

    epsilon: float
    comparisons: tuple[Comparison, ...]

    def count(self, grade: Grade) -> int:
        return sum(c.grade == grade for c in self.comparisons)

    @property
    def noise_floor(self) -> float:
        """Largest known gap at which the runs differ, 0 where they never do."""
        return max((c.gap for c in self.comparisons if c.gap is not None), default=0.0)

    def exit_code(self, strict: bool = False) -> int:
        """0: the outputs agree; 1: some diverge or, if strict, tie; 2: nothing was compared."""
        if not self.comparisons:
            return 2
        failed = self.count("divergent") + (self.count("tie") if strict else 0)
        return 1 if failed else 0

    def to_dict(self) -> dict[str, Any]:
        """Counts, and each prompt in which anything differs; ready for JSON."""
        return {
            "prompts": len(self.comparisons),
            **{grade: self.count(grade) for grade in get_args(Grade)},
            "tokens_equal": sum(c.num_equal for c in self.comparisons),
            "noise_floor": self.noise_floor,
            "differences": [asdict(c) for c in self.comparisons if c.reason],
        }


def compare(baseline: Sequence[Record], candidate: Sequence[Record], epsilon: float) -> Summary:
    """Grade each prompt of `candidate` against `baseline`, which holds the same prompts in order.

    epsilon: in units of top_gap, at least 0; 0 calls nothing a tie.
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be at least 0, got {epsilon}")
    if len(baseline) != len(candidate):
        raise ValueError(f"candidate must have {len(baseline)} records, got {len(candidate)}")
    pairs = enumerate(zip(baseline, candidate, strict=True))
    return Summary(epsilon, tuple(_compare_one(i, b, c, epsilon) for i, (b, c) in pairs))


def report(
    candidate: Summary, control: Summary | None = None, strict: bool = False
) -> dict[str, Any]:
    """The report of a run, ready for JSON.

    control: the baseline against itself at another batch size, by the same epsilon. What differs
    there is the engine's own noise; its exit code 1 says that epsilon does not cover it.
    """
    result: dict[str, Any] = {
        "epsilon": candidate.epsilon,
        "strict": strict,
        "exit_code": candidate.exit_code(strict),
        "candidate": candidate.to_dict(),
    }
    if control is not None:
        if control.epsilon != candidate.epsilon:
            wanted = f"the candidate's {candidate.epsilon}"
            raise ValueError(f"epsilon of the control must be {wanted}, got {control.epsilon}")
        result["control"] = {"exit_code": control.exit_code(), **control.to_dict()}
    return result


def _compare_one(index: int, baseline: Record, candidate: Record, epsilon: float) -> Comparison:
    if list(baseline["prompt_token_ids"]) != list(candidate["prompt_token_ids"]):
        raise ValueError(f"prompt_token_ids of record {index} must be the baseline's, got others")
    wanted, got = list(baseline["token_ids"]), list(candidate["token_ids"])
    gaps = _top_gaps(index, baseline)
    shorter = min(len(wanted), len(got))
    at = next((i for i in range(shorter) if wanted[i] != got[i]), shorter)
    if at == shorter:
        return _compare_ends(index, baseline, candidate, at)
    gap = gaps[at]
    grade: Grade = "tie" if gap is not None and gap < epsilon else "divergent"
    reason = "tokens differ, " + ("gap unknown" if gap is None else f"gap {gap:.3g}")
    return Comparison(index, grade, at, reason, wanted[at], got[at], gap)


def _compare_ends(index: int, baseline: Record, candidate: Record, num_equal: int) -> Comparison:
    """One output is the other's prefix, `num_equal` tokens long: do both end there, and alike?"""
    ends = [(len(r["token_ids"]), r.get("finish_reason")) for r in (baseline, candidate)]
    if ends[0] == ends[1]:
        return Comparison(index, "equal", num_equal)
    (wanted, wanted_reason), (got, got_reason) = ends
    reason = f"ended by {got_reason} after {got} tokens, baseline by {wanted_reason} after {wanted}"
    excuse = candidate.get("explained") or baseline.get("explained")
    tokens = [next(iter(r["token_ids"][num_equal:]), None) for r in (baseline, candidate)]
    grade: Grade = "equal" if excuse else "divergent"
    return Comparison(index, grade, num_equal, f"{reason}: {excuse}" if excuse else reason, *tokens)


def _top_gaps(index: int, record: Record) -> list[float | None]:
    """One gap an emitted token, None where unknown."""
    num_tokens = len(record["token_ids"])
    gaps = record.get("top_gap")
    if gaps is None:
        return [None] * num_tokens
    if len(gaps) != num_tokens:
        raise ValueError(f"top_gap of record {index} must have {num_tokens} gaps, got {len(gaps)}")
    wrong = [gap for gap in gaps if gap is not None and not 0 <= gap < math.inf]
    if wrong:
        raise ValueError(f"top_gap of record {index} must be finite and >= 0, got {wrong[0]}")
    return list(gaps)
