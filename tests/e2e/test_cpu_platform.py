"""What the CPU platform makes of a config, and which engines it leaves to vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from configs import BASE, changed, fresh_environment, make
from engines import PAIR

from kdtree_runner import cpu_platform, cpu_scope, platform

pytestmark = pytest.mark.skipif(not platform.is_cpu_build(), reason="of the CPU platform")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_environment(monkeypatch)


def test_scheduling_stays_as_asked() -> None:
    made = make()
    scheduler, cache = made.scheduler_config, made.cache_config
    assert scheduler.async_scheduling and scheduler.enable_chunked_prefill
    assert cache.enable_prefix_caching and cache.block_size == 16
    made = make(async_scheduling=False, enable_prefix_caching=False)
    assert not made.scheduler_config.async_scheduling
    assert not made.cache_config.enable_prefix_caching


def test_amx_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert make().cache_config.block_size == 16


@pytest.mark.parametrize("named", [None, "KDTREE_MLA"])
def test_no_name_of_ours_is_in_a_config_that_a_spawned_process_reads(named: str | None) -> None:
    assert make(attention_backend=named).attention_config.backend is None


def test_compiler_is_off() -> None:
    from vllm.config import CompilationMode

    assert make(enforce_eager=False).compilation_config.mode == CompilationMode.NONE


def test_ray_gets_our_executor() -> None:
    pytest.importorskip("ray")
    made = make(tensor_parallel_size=2, distributed_executor_backend="ray")
    assert made.parallel_config.distributed_executor_backend.__name__ == "CpuRayExecutor"
    assert made.parallel_config.use_ray


def test_other_engines_stay_stock(tmp_path: Path) -> None:
    """No speculation and no latent attention: V1, compiled, pages of 128 tokens."""
    from vllm.config import CompilationMode
    from vllm.engine.arg_utils import EngineArgs

    names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64}
    folder = changed("target", tmp_path, **names, kv_lora_rank=None, rope_scaling=None)
    made = EngineArgs(model=str(folder), **BASE).create_engine_config()
    assert not cpu_scope.serves(made) and not made.use_v2_model_runner
    assert made.cache_config.block_size == 128
    assert made.compilation_config.mode != CompilationMode.NONE
    assert not made.scheduler_config.async_scheduling


def test_baseline_is_ours() -> None:
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs(model=str(PAIR / "target"), **BASE).create_engine_config()
    assert cpu_scope.serves(made) and made.use_v2_model_runner


def test_half_precision_stays_stock() -> None:
    from vllm.engine.arg_utils import EngineArgs

    other = BASE | {"dtype": "float16"}
    made = EngineArgs(model=str(PAIR / "target"), **other).create_engine_config()
    assert not cpu_scope.serves(made) and not made.use_v2_model_runner


@pytest.mark.parametrize(
    ("cpus", "ranks", "binding"),
    [
        ([(0, 0, 0), (0, 1, 1)], 2, "0|1"),
        ([(0, 0, 0)], 2, "nobind"),
        ([(0, c, c) for c in range(6)], 2, "0,1|3,4"),  # one of three cores for the scheduler
        ([(0, c // 2, c) for c in range(8)], 2, "1|5"),  # one of a core's two threads
        ([(n, c, 2 * c + n) for n in (0, 1) for c in (0, 1)], 4, "0|2|1|3"),
    ],
)
def test_cores_of_the_ranks(cpus: list[tuple[int, int, int]], ranks: int, binding: str) -> None:
    assert cpu_scope.thread_binding(cpus, ranks) == binding


def test_a_binding_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setattr(cpu_scope, "_bound_by_us", None)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    cpu_scope.bind_threads(2)
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    cpu_scope.bind_threads(2)
    first = os.environ["VLLM_CPU_OMP_THREADS_BIND"]
    cpu_scope.bind_threads(4)  # ours does not bind the next engine
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] != first or first == "auto"


def test_platform() -> None:
    from vllm.platforms import current_platform

    assert isinstance(current_platform, cpu_platform.TreeCpuPlatform)
