"""Configs of vLLM, made as `vllm serve` makes them: no weights are read."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import PAIR
from vllm import envs

from kdtree_runner import config

BASE = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8}


def fresh_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a config sets variables for the engine's processes; a test must not keep them.

    An engine of an earlier test has made vLLM keep the variables' values: they must count again.
    """
    envs.disable_envs_cache()
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)


def make(spec: dict[str, Any] | None = None, target: Path | None = None, **arguments: Any) -> Any:
    """The VllmConfig of `vllm serve`. spec: changes of the speculative config."""
    from vllm.engine.arg_utils import EngineArgs

    ours = {"method": "ddtree", "model": str(PAIR / "drafter"), "tree_budget": 16} | (spec or {})
    model = str(target or PAIR / "target")
    args = EngineArgs(**({"model": model, "speculative_config": ours} | BASE | arguments))
    return args.create_engine_config()


def check_refusal(call: Callable[[], object], key: str, got: str) -> None:
    """The call fails soon, with our "KEY: wanted X, got Y"."""
    start = time.monotonic()
    with pytest.raises(ValueError, match=re.escape(key)) as error:
        call()
    assert isinstance(error.value, config.UnsupportedError), error.value
    parts = re.fullmatch(r"(.+?): wanted (.+), got (.+)", str(error.value), re.DOTALL)
    assert parts is not None, str(error.value)
    assert key in parts[1] and got in parts[3], parts.groups()
    assert time.monotonic() - start < 60  # no weights are read


def changed(part: str, tmp_path: Path, **changes: Any) -> Path:
    """A copy of the target's or drafter's config with changes; it has no weights."""
    folder = tmp_path / part
    folder.mkdir()
    for file in (PAIR / part).iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | changes))
    return folder
