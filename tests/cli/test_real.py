"""The commands with real vLLM and the miniature pair."""

import json
from pathlib import Path

import pytest

from kdtree_runner.cli.main import main

TINY_KIMI = Path(__file__).parents[2] / "examples" / "tiny_kimi"
PAIR = ["--model", str(TINY_KIMI / "target"), "--drafter", str(TINY_KIMI / "drafter")]
ENGINE = ["--dtype", "float32", "--cpu-threads", "1"]


@pytest.mark.slow
def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    length = ["--num-prompts", "3", "--max-tokens", "12", "--tree-budget", "8"]
    assert main(["verify", *PAIR, *ENGINE, *length, "--json", str(out)]) == 0
    assert "tree 8: 3 equal, 0 tie, 0 divergent of 3 prompts" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["warnings"] == []
    plain, tree = report["modes"]["plain"], report["modes"]["tree 8"]
    assert plain["attention"] == ["KDTREE_MLA"]
    assert "KDTREE_MLA" in tree["attention"]
    assert plain["num_tokens"] == tree["num_tokens"] == 36
    assert plain["tokens_per_step"] == 1.0
    assert tree["tokens_per_step"] > 1.5
    assert tree["acceptance"]["num_drafts"] > 0
    assert tree["acceptance"]["mean_nodes"] > 4


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
