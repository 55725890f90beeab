"""The model of Kimi K2.6's widths without weights: its configs, its routing, the projection."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kdtree_runner.config import TreeConfig, text_config
from kdtree_runner.sharding import rank_share
from kdtree_runner.spread_routing import STRATEGY, VARIABLE, distinct_experts, register_strategy

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "tests" / "data" / "kimi_k26"
USER = {"method": "ddtree", "model": "drafter", "tree_budget": 16}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "kimi_shaped.py"
    spec = importlib.util.spec_from_file_location("kimi_shaped", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def published(part: str) -> dict:
    return json.loads((PUBLISHED / part / "config.json").read_text())


def test_the_whole_has_the_published_sizes(script: ModuleType) -> None:
    text, target = vars(text_config(published("target"))), script.target_config(61, 1)
    drafter, ours = published("drafter"), script.drafter_config(61, 1)
    free = {"bos_token_id", "eos_token_id", "quantization_config"}
    assert {k: v for k, v in target.items() if k not in free} == {
        k: text[k] for k in target if k not in free
    }
    groups = target["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert groups["group_size"] == 32 and groups["num_bits"] == 4
    assert target["quantization_config"]["ignore"] == text["quantization_config"]["ignore"]
    free = {"dflash_config", "rope_scaling"}
    assert {k: v for k, v in ours.items() if k not in free} == {
        k: drafter[k] for k in ours if k not in free
    }
    assert ours["dflash_config"]["mask_token_id"] == 163838
    assert len(set(ours["dflash_config"]["target_layer_ids"])) == 6


@pytest.mark.parametrize("layers", [8, 16, 61])
@pytest.mark.parametrize("share", [1, 8])
def test_every_shape_is_a_pair_that_we_serve(script: ModuleType, layers: int, share: int) -> None:
    target, drafter = script.target_config(layers, share), script.drafter_config(layers, share)
    assert TreeConfig.from_files(USER, target, drafter, 4096).num_nodes == 16
    assert len(set(drafter["dflash_config"]["target_layer_ids"])) == 6
    whole = text_config(published("target"))
    for key, size in rank_share(whole, share).items():
        assert target[key] == size


def test_make_and_project(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reports = []
    for layers, plain, tree in ((8, 2.0, 3.0), (16, 3.0, 5.0)):
        folder = tmp_path / str(layers)
        monkeypatch.setattr(
            sys, "argv", ["kimi_shaped", "make", str(folder), "--layers", str(layers)]
        )
        script.main()
        assert "--spread-routing" in capsys.readouterr().out
        prompt = json.loads((folder / "prompts.jsonl").read_text().splitlines()[0])
        assert max(prompt["prompt_token_ids"]) < 20480
        cells = {
            label: {"budget": budget, "cells": [{"batch": 2, "step_ms": ms}]}
            for label, budget, ms in (("plain", None, plain), ("tree 8", 8, tree))
        }
        settings = {"model": str(folder / "target"), "horizon": None}
        reports.append(folder / "e2e.json")
        reports[-1].write_text(json.dumps({"modes": cells, "settings": settings}))
    argv = ["kimi_shaped", "project", *map(str, reports), "--all-reduce-us", "10"]
    monkeypatch.setattr(sys, "argv", argv)
    script.main()
    lines = capsys.readouterr().out.splitlines()
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in lines[2:4]]
    # 8 layers more are 1 ms and 2 ms; 45 more, 5.625 and 11.25; the exchange 1.22.
    assert rows[0][1:] == ["plain", "2", "16", "2.00", "3.00", "125", "8.62", "9.85", "1.00"]
    assert rows[1][1:3] == ["tree 8", "18"]
    assert rows[1][6:] == ["250", "16.25", "17.47", "1.77"]
    assert "PROJECTED from 8 and 16 layers" in lines[-1]
    assert "ASSUMED 10 us" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["make", "{}", "--share-of", "3"], "--share-of: wanted one of"),
        (["make", "{}", "--share-of", "0"], "--share-of: wanted one of"),
        (["make", "{}", "--layers", "7"], "--layers: wanted at least 8, got 7"),
        (["project", "{}/none.json", "{}/none.json"], "none.json"),
        (["project", "{}/odd.json", "{}/odd.json"], "odd.json"),
    ],
)
def test_mistakes(
    script: ModuleType,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "odd.json").write_text("{}")
    folder = str(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kimi_shaped.py", *(a.format(folder) for a in arguments)])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "target").exists()


def test_distinct_experts() -> None:
    assert distinct_experts(384, 8, 1) == pytest.approx(8, rel=0.01)
    assert distinct_experts(384, 8, 17) == pytest.approx(116, rel=0.02)
    assert distinct_experts(384, 8, 10**5) == pytest.approx(384)


def test_routing_spreads(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = pytest.importorskip(
        "vllm.model_executor.layers.fused_moe.router.routing_simulator_router"
    ).RoutingSimulator
    torch = pytest.importorskip("torch")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(simulator, "_routing_strategies", dict(simulator._routing_strategies))
    register_strategy()
    assert STRATEGY not in simulator.get_available_strategies()
    monkeypatch.setenv(VARIABLE, STRATEGY)
    register_strategy()
    register_strategy()
    hidden, logits = torch.zeros(17, 64), torch.zeros(17, 384)
    found = []
    for _ in range(200):
        weights, ids = simulator.simulate_routing(hidden, logits, STRATEGY, 8, torch.int32)
        assert weights.shape == ids.shape == (17, 8)
        assert ids.dtype == torch.int32
        found.append(len(ids.unique()))
    assert weights.sum() == pytest.approx(17)
    assert sum(found) / len(found) == pytest.approx(distinct_experts(384, 8, 17), rel=0.02)
