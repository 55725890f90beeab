"""With kdtree_runner installed, plain vLLM answers as it does without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import PAIR
from processes import user_environment

from kdtree_runner import platform

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not platform.is_cpu_build(), reason="of the CPU platform"),
]

# A drafter of any quality will do here: what counts is that the engine runs as it did.
CONFIGS: list[dict[str, Any] | None] = [
    None,
    {
        "method": "dflash",
        "model": str(PAIR / "drafter"),
        "num_speculative_tokens": 7,
        "draft_load_config": {"load_format": "auto"},  # the target's weights are dummies
    },
    # Last: it imports numba, and vLLM's search for kernels stumbles over llvmlite's objects.
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
]
SCRIPT = """
import gc, json, sys
import vllm, vllm.v1.engine.core as core
core.cleanup_dist_env_and_memory = gc.collect
answers = []
for spec in json.loads(sys.argv[2]):
    llm = vllm.LLM(
        model=sys.argv[1], dtype="float32", load_format="dummy", enforce_eager=True, seed=0,
        max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes=64 << 20,
        speculative_config=spec,
    )
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": [9, 8, 7] * 8}] * 2, greedy, use_tqdm=False)
    config = llm.llm_engine.vllm_config
    answers.append({
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "page": config.cache_config.block_size,
        "async": config.scheduler_config.async_scheduling,
        "backend": str(config.attention_config.backend),
    })
    llm.llm_engine.engine_core.shutdown()
    del llm
print("ANSWERS" + json.dumps(answers))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without latent attention that the miniature drafter fits; its weights are random."""
    folder = tmp_path_factory.mktemp("stock") / "qwen3"
    folder.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((PAIR / "target" / name).read_bytes())
    return folder


def test_plain_vllm(model: Path) -> None:
    runs = {
        name: subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(model), json.dumps(CONFIGS)],
            env=user_environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", **changes),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, changes in (("with us", {}), ("without", {"VLLM_PLUGINS": "none of them"}))
    }
    answers = {}
    for name, run in runs.items():
        out, errors = run.communicate(timeout=500)
        assert run.returncode == 0, f"{name}: {errors[-6000:]}"
        (line,) = [s for s in out.splitlines() if s.startswith("ANSWERS")]
        answers[name] = json.loads(line.removeprefix("ANSWERS"))
    assert answers["with us"] == answers["without"]
    assert {a["runner"] for a in answers["without"]} == {"V1"}
