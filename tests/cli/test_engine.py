"""Engine arguments: the baseline and the speculative engines differ in speculation alone."""

from dataclasses import replace

import pytest
from cli_fakes import CHAIN, CONTROL, PLAIN, SETTINGS, TREE

from kdtree_runner.cli import engine
from kdtree_runner.cli.engine import Sampling, engine_args, engine_environment, wants_gaps


@pytest.mark.parametrize("cpu", [True, False])
def test_only_speculation_differs(cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "is_cpu_build", lambda: cpu)
    plain = engine_args(PLAIN, SETTINGS)
    assert "speculative_config" not in plain
    for mode in (CHAIN, TREE):
        args = engine_args(mode, SETTINGS)
        args.pop("speculative_config")
        assert args == plain
    assert ("attention_backend" in plain) == (not cpu)
    assert ("kv_cache_memory_bytes" in plain) == cpu
    settings = replace(SETTINGS, kv_cache_gib=2.0)
    assert engine_args(PLAIN, settings)["kv_cache_memory_bytes"] == 2 << 30


def test_threads_are_set_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, cpu_threads=3)
    monkeypatch.setattr(engine, "is_cpu_build", lambda: False)
    assert engine_environment(settings) == {}
    monkeypatch.setattr(engine, "is_cpu_build", lambda: True)
    assert engine_environment(settings)["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in engine_environment(SETTINGS)


def test_speculation_of_each_mode() -> None:
    settings = replace(SETTINGS, horizon=5)
    tree = engine_args(TREE, settings)["speculative_config"]
    assert tree == {
        "method": "ddtree",
        "model": "drafter",
        "num_speculative_tokens": 5,
        "tree_budget": 16,
    }
    chain = engine_args(CHAIN, settings)["speculative_config"]
    assert chain == {"method": "dflash", "model": "drafter", "num_speculative_tokens": 5}
    default = engine_args(TREE, SETTINGS)["speculative_config"]
    assert "num_speculative_tokens" not in default


@pytest.mark.parametrize(("batch", "other"), [(1, 8), (8, 1), (2, 1)])
def test_control_runs_at_another_batch_size(batch: int, other: int) -> None:
    settings = replace(SETTINGS, batch_size=batch)
    assert engine_args(PLAIN, settings)["max_num_seqs"] == batch
    assert engine_args(CONTROL, settings)["max_num_seqs"] == other


def test_what_is_not_set_is_left_to_vllm() -> None:
    args = engine_args(PLAIN, SETTINGS)
    assert not {"max_model_len", "gpu_memory_utilization", "language_model_only"} & set(args)
    settings = replace(
        SETTINGS,
        max_model_len=64,
        tensor_parallel_size=2,
        executor="ray",
        language_model_only=True,
        gpu_memory_utilization=0.5,
    )
    args = engine_args(PLAIN, settings)
    assert args["max_model_len"] == 64
    assert args["tensor_parallel_size"] == 2
    assert args["distributed_executor_backend"] == "ray"
    assert args["language_model_only"] is True
    assert args["gpu_memory_utilization"] == 0.5


def test_gaps_are_recorded_of_the_greedy_baseline_only() -> None:
    greedy, sampled = Sampling(max_tokens=4), Sampling(max_tokens=4, temperature=0.7)
    assert wants_gaps(PLAIN, greedy)
    assert not wants_gaps(PLAIN, sampled)
    assert not wants_gaps(TREE, greedy)
    assert not wants_gaps(CONTROL, greedy)
