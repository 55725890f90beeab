"""The commands with real vLLM and the miniature pair."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from kdtree_runner.cli import supervise
from kdtree_runner.cli.main import main

TINY_KIMI = Path(__file__).parents[2] / "examples" / "tiny_kimi"
PAIR = ["--model", str(TINY_KIMI / "target"), "--drafter", str(TINY_KIMI / "drafter")]
ENGINE = ["--dtype", "float32", "--cpu-threads", "1"]


# The real child, but trees of 9 nodes leave the accepted rows of the cache where they are.
BREAKING_CHILD = """
import sys
from kdtree_runner.cli import child

intact = child.make_engine

def stop_commits(worker):
    worker.model_runner.rejection_sampler.commit = lambda batch: None

def make_engine(args, channel):
    llm = intact(args, channel)
    if args.get("speculative_config", {}).get("tree_budget") == 9:
        llm.collective_rpc(stop_commits)
    return llm

child.make_engine = make_engine
sys.exit(child.main(sys.argv))
"""


@pytest.mark.slow
def test_verify_tells_a_whole_engine_from_a_broken_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, "-c", BREAKING_CHILD)
    monkeypatch.setattr(supervise, "run_job", partial(supervise.run_job, command=command))
    out = tmp_path / "report.json"
    length = ["--num-prompts", "4", "--max-tokens", "24", "--tree-budget", "8,9"]
    assert main(["verify", *PAIR, *ENGINE, *length, "--json", str(out)]) == 1
    assert "tree 8: 4 equal, 0 tie, 0 divergent of 4 prompts" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["verdict"] == "divergent"
    assert report["comparisons"]["tree 9"]["divergent"] > 0
    plain, tree = report["modes"]["plain"], report["modes"]["tree 8"]
    assert plain["attention"] == ["KDTREE_MLA"]
    assert "KDTREE_MLA" in tree["attention"]
    assert plain["num_tokens"] == tree["num_tokens"] == 96
    assert plain["tokens_per_step"] == 1.0
    assert tree["tokens_per_step"] > 1.5
    assert tree["acceptance"]["mean_nodes"] > 4


@pytest.mark.slow
def test_benchmarks_of_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "x.json", tmp_path / "x.svg"
    files = ["--json", str(out), "--plot", str(plot)]
    which = ["--modes", "plain,tree", "--tree-budget", "8", "--max-model-len", "1024"]
    size = ["--batches", "1,2", "--num-prompts", "2", "--max-tokens", "24", "--repeats", "1"]
    assert main(["bench", "e2e", *PAIR, *ENGINE, *which, *size, *files]) == 0
    assert "WARNING" not in capsys.readouterr().out
    modes = json.loads(out.read_text())["modes"]
    assert [cell["batch"] for cell in modes["tree 8"]["cells"]] == [1, 2]
    for batch in ("1", "2"):
        assert modes["tree 8"]["ratios"][batch]["equal"] == [2, 2]
    assert all(cell["tokens_per_step"] == 1 for cell in modes["plain"]["cells"])
    assert all(cell["tokens_per_step"] > 1.5 for cell in modes["tree 8"]["cells"])
    assert plot.is_file()

    assert main(["bench", "step", *PAIR, *ENGINE, *which, "--num-steps", "4", *files]) == 0
    modes = json.loads(out.read_text())["modes"]
    host = {label: mode["batches"][0]["profile"]["host"] for label, mode in modes.items()}
    parts = {"prepare", "verify", "sampler", "schedule", "outputs"}
    assert set(host["plain"]) == parts
    assert set(host["tree 8"]) == parts | {"accept", "commit", "draft", "build"}
    assert all(time > 0 for time in host["tree 8"].values())
    for mode in modes.values():
        profile = mode["batches"][0]["profile"]
        assert profile["num_steps"] == 4
        assert sum(profile["host"].values()) < profile["step"]


def test_a_refusal_of_the_engine_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *PAIR, *ENGINE, "--num-prompts", "1", "--horizon", "9"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    wanted = "num_speculative_tokens: wanted an integer in [1, 7], got 9"
    assert last == f"kdtree verify: tree 16: {wanted}"


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert code == 0
    assert report["vllm"]["method 'ddtree'"] == "known"
    assert report["native"]["built for"].startswith("cpu")
    assert set(report["plugins"].values()) == {"active"}
