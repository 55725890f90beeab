"""`kdtree bench e2e` from flags to tables, with fake engines; and what a wave counts."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.dom import minidom

import pytest
from cli_fakes import DRAFTS, NO_DRAFTS, result, write_model

from kdtree_runner.cli import supervise
from kdtree_runner.cli.bench_e2e_report import Cell, Ratio, num_equal
from kdtree_runner.cli.child_waves import Wave, measure
from kdtree_runner.cli.engine import engine_environment
from kdtree_runner.cli.errors import EngineError, UserError
from kdtree_runner.cli.main import main
from kdtree_runner.cli.supervise import BenchJob
from kdtree_runner.cli.svg import ticks

SPEEDS = {"plain": 100.0, "chain": 200.0, "tree": 300.0}


def cell(batch: int, repeat: int, speed: float, ids: list[int], acceptance: dict) -> dict:
    return {
        "batch": batch,
        "repeat": repeat,
        "first": 2 * repeat,
        "step_seconds": [2.0 / speed] * 5,
        "num_tokens": 10,
        "wall_seconds": 1.0,
        "first_token_seconds": [0.02, 0.04],
        "token_ids": [ids, ids],
        "acceptance": acceptance,
    }


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[BenchJob]]:
    """Put fake engines in place.

    Those named in `broken` fail after a measurement, `refused` ones refuse their arguments, `idle`
    ones never draft, at `halts` the user ends the command. steps: of a measurement.
    """

    def install(
        broken: str = "", idle: str = "", halts: str = "", refused: str = "", steps: int = 5
    ) -> list[BenchJob]:
        jobs: list[BenchJob] = []

        def run_job(job, log_dir, on_event, silence_seconds):
            jobs.append(job)
            kind = job.mode.kind
            if kind == refused:
                raise UserError(f"{job.mode.label}: tree_args: wanted less, got more")
            drafts = NO_DRAFTS if kind in ("plain", idle) else DRAFTS
            ids = [1, 2, 9] if kind == "chain" else [1, 2, 3]
            cells = [
                cell(b, r, SPEEDS[kind] * (1 + 0.1 * r), ids, drafts)
                | {"step_seconds": [2.0 / SPEEDS[kind] / (1 + 0.1 * r)] * steps}
                for b in job.batches
                for r in range(job.repeats)
            ]
            for measurement in cells:
                on_event({"event": "measured", "measurement": measurement})
                if kind == halts:
                    raise KeyboardInterrupt
                if kind == broken:
                    raise EngineError(f"{job.mode.label}: the engine failed: no memory\nits log")
            event = result([], drafts, cells=cells, num_tokens=30, graphs={})
            on_event(event)
            return event

        monkeypatch.setattr(supervise, "run_job", run_job)
        return jobs

    return install


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\nthree\n")
    pair = ["--model", write_model(tmp_path / "t"), "--drafter", write_model(tmp_path / "d")]
    return ["bench", "e2e", *pair, "--prompts", str(prompts), "--batches", "4,1", "--repeats", "3"]


def test_ratios_are_paired_and_equality_stands_beside_them(
    flags: list[str], engines: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = engines()
    out, plot = tmp_path / "x.json", tmp_path / "x.svg"
    more = ["--tree-budget", "8,16", "--num-prompts", "2", "--json", str(out), "--plot", str(plot)]
    assert main([*flags, *more]) == 0
    assert [job.mode.label for job in jobs] == ["plain", "chain", "tree 8", "tree 16"]
    assert jobs[0].batches == (1, 4)
    assert jobs[0].requests == 2
    assert {job.settings.batch_size for job in jobs} == {4}
    rows = [
        [part.strip() for part in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|") and line.split("|")[1].strip().isdigit()
    ]
    assert [row[:2] for row in rows] == [
        [batch, mode] for batch in ("1", "4") for mode in ("plain", "chain", "tree 8", "tree 16")
    ]
    # Speeds of repeats differ, ratios do not: they are of the same repeat.
    assert rows[0][2:] == ["110", "2.00", "18.18", "30.0", "-", "0.50 ±0.00 (0.50-0.50)", "-"]
    assert rows[1][6:] == ["2.00 ±0.00 (2.00-2.00)", "-", "0 of 6"]
    assert rows[2][6:] == ["3.00 ±0.00 (3.00-3.00)", "1.50 ±0.00 (1.50-1.50)", "6 of 6"]
    assert rows[4][8] == "6 of 6"  # plain at batch 4 against itself at batch 1
    report = json.loads(out.read_text())
    assert report["modes"]["tree 8"]["ratios"]["4"]["chain"]["mean"] == pytest.approx(1.5)
    assert report["modes"]["chain"]["backend"] is None
    minidom.parse(str(plot))


@pytest.mark.parametrize(("how", "code", "num_kept"), [("broken", 3, 1), ("refused", 2, 0)])
def test_an_engine_that_ends_early_loses_nothing(
    how: str,
    code: int,
    num_kept: int,
    flags: list[str],
    engines: Callable,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engines(**{how: "chain"})
    out, plot = tmp_path / "x.json", tmp_path / "x.svg"
    assert main([*flags, "--tree-budget", "8", "--json", str(out), "--plot", str(plot)]) == code
    captured = capsys.readouterr()
    assert "3.00 ±0.00 (3.00-3.00)" in captured.out
    assert "no whole measurement of chain" in captured.err
    chain = json.loads(out.read_text())["modes"]["chain"]
    assert chain["problem"].startswith("chain: ")
    assert len(chain["cells"]) == num_kept
    minidom.parse(str(plot))


def test_too_few_tokens_are_no_measurement(
    flags: list[str], engines: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    engines(steps=0)
    assert main([*flags, "--tree-budget", "8"]) == 2
    assert "--max-tokens: wanted more, so that a step decodes the whole" in capsys.readouterr().err


def test_what_was_measured_is_kept_when_the_command_is_ended(
    flags: list[str], engines: Callable, tmp_path: Path
) -> None:
    engines(halts="chain")
    out = tmp_path / "x.json"
    assert main([*flags, "--json", str(out)]) == 130
    modes = json.loads(out.read_text())["modes"]
    assert {label: len(mode["cells"]) for label, mode in modes.items()} == {"plain": 6, "chain": 1}


def test_a_chain_that_never_drafts_is_no_measurement(
    flags: list[str], engines: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    engines(idle="chain")
    assert main([*flags, "--modes", "chain,tree"]) == 3
    assert "no measurement of chain" in capsys.readouterr().err


def test_a_job_says_what_its_child_needs(flags: list[str], engines: Callable) -> None:
    jobs = engines()
    extra = '{"load_format": "dummy", "max_model_len": 64}'
    more = ["--engine-args", extra, "--tree-args", '{"tree_spine": true}', "--spread-routing"]
    assert main([*flags, "--modes", "tree", "--tree-budget", "8", *more]) == 0
    job = jobs[0].to_dict()
    assert job["task"] == "waves"
    assert job["batches"] == (1, 4)
    assert job["engine"]["max_num_seqs"] == 4
    assert job["engine"]["load_format"] == "dummy"
    assert job["engine"]["speculative_config"]["tree_spine"] is True
    assert job["sampling"]["ignore_eos"]
    environment = engine_environment(jobs[0].settings)
    assert environment["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] == "kdtree_uniform"


def test_only_steps_of_the_whole_batch_count() -> None:
    wave = Wave([[], []])
    wave.ends = [1.0, 2.0, 3.0, 4.0, 5.0]
    wave.counts = [[1, 0], [2, 1], [3, 3], [2, 4], [0, 5]]
    wave.last = 4  # the fifth step ended a request
    assert wave.first_token == [1.0, 2.0]
    assert wave.middle == ([1.0, 1.0], 12)
    wave.last = 1
    assert wave.middle == ([], 0)


class OneStepEngine:
    """In the place of an engine: each request ends with its first step. Notes prompts and seeds."""

    def __init__(self) -> None:
        self.llm_engine, self.waiting, self.seen = self, [], set()

    def add_request(self, name: str, prompt: dict, params: Any) -> None:
        self.waiting.append(name)
        self.seen.add((prompt["prompt_token_ids"][0], params.seed))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[Any]:
        done, self.waiting = self.waiting, []
        completion = SimpleNamespace(token_ids=[1])
        return [SimpleNamespace(request_id=n, finished=True, outputs=[completion]) for n in done]

    def reset_prefix_cache(self) -> bool:
        return True

    def get_metrics(self) -> list[Any]:
        return []

    def collective_rpc(self, method: Callable) -> list[dict]:
        return [{}]


def test_a_prompt_draws_with_its_seed_at_every_batch_size() -> None:
    engine = OneStepEngine()
    sampling = {"temperature": 1.0, "seed": 5, "max_tokens": 4}
    job = {"batches": (1, 2, 4), "repeats": 2, "requests": 2, "sampling": sampling}

    class Quiet:
        seconds = 0.0

        def send(self, event: str, **fields: Any) -> None:
            pass

        @contextmanager
        def turn(self) -> Iterator[dict]:
            yield {}

    found = measure(engine, [[i] for i in range(6)], job, Quiet())
    assert engine.seen == {(i, 5 + i) for i in range(6)}
    assert [cell["first"] for cell in found["cells"]] == [0, 2] * 3
    assert [len(cell["token_ids"]) for cell in found["cells"]] == [2, 2, 2, 2, 4, 4]


def test_equality_is_that_of_the_same_prompt() -> None:
    def ran(first: int, *tokens: list[int]) -> Cell:
        return Cell(**cell(1, 0, 1.0, [], DRAFTS) | {"first": first, "token_ids": list(tokens)})

    alone = [ran(0, [1], [2]), ran(2, [3], [4])]
    together = [ran(0, [1], [2], [3]), ran(2, [3], [9], [5])]  # prompt 4 has nothing beside it
    assert num_equal(together, alone) == (4, 5)


def test_ratios_have_a_mean_and_its_error() -> None:
    assert Ratio.of([]) is None
    assert str(Ratio.of([2.0])) == "2.00 (2.00-2.00)"
    found = Ratio.of([0.5, 1.0, 2.0, 4.0])
    assert found is not None
    assert found.mean == pytest.approx(math.sqrt(2))
    # Logarithms -1, 0, 1, 2 of base 2: their standard deviation is sqrt(5 / 3).
    assert found.error == pytest.approx(math.sqrt(2) * math.log(2) * math.sqrt(5 / 3) / 2)
    assert str(found) == "1.41 ±0.63 (0.50-4.00)"


@pytest.mark.parametrize("top", [0.003, 0.9, 1.0, 7.0, 99.0, 1234.0])
def test_ticks_reach_the_top_and_are_few(top: float) -> None:
    marks = ticks(top)
    assert marks[0] == 0
    assert marks[-1] >= top * (1 - 1e-9)
    assert 3 <= len(marks) <= 9
