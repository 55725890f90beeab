"""Real vLLM in this process: what must hold before it is imported, and the shared engines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's parts are in reach of the tests
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# The matrices are tiny, and OpenMP's threads spin while they wait: a second one doubles the time on
# a busy machine. "nobind" keeps vLLM from choosing the number itself.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

sys.path.insert(0, str(Path(__file__).parent))  # the tests' own modules: engines, oracle

from collections.abc import Iterator
from types import SimpleNamespace

import kernels
import pytest
import torch
from engines import Baseline, EnginePool, load_prompts

torch.set_num_threads(1)  # torch may have been imported before the variable was set


@pytest.fixture(scope="session")
def pool() -> Iterator[EnginePool]:
    """The engines of this session; the last two used stay alive."""
    engines = EnginePool(capacity=2)
    yield engines
    engines.close()


@pytest.fixture(scope="session")
def baseline(pool: EnginePool) -> Baseline:
    """What the plain engine answers; every request is computed once a session."""
    return Baseline(pool)


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    """The token ids of the miniature pair's held-out prompts, 20 to 400 tokens each."""
    return load_prompts()


@pytest.fixture(scope="module")
def plugins() -> None:
    kernels.load_plugins()


@pytest.fixture
def batch() -> SimpleNamespace:
    """What a vLLM kernel of the input batch works on."""
    return kernels.random_batch()
