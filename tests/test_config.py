"""Every refusal of kdtree_runner.config, on plain objects: what is named, wanted and got."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace as Fake
from typing import Any

import pytest
import torch

from kdtree_runner import config, platform
from kdtree_runner.config import TreeConfig, UnsupportedError

BLOCK = 8  # of the drafter: at most 7 drafted positions
USER = {"method": "ddtree", "model": "drafter", "num_speculative_tokens": 7, "tree_budget": 16}

SCHEDULE = "num_speculative_tokens_per_batch_size"


def target(**changes: Any) -> Fake:
    """A target's text config, the geometry of Kimi K2.6."""
    values = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "num_hidden_layers": 61,
    }
    return Fake(**(values | changes))


def drafter(flash: dict[str, Any] | None = None, **changes: Any) -> Fake:
    """A drafter's config, as published for Kimi K2.6. flash: changes of its dflash_config."""
    values = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 7168,
        "vocab_size": 163840,
        "num_target_layers": 61,
        "max_position_embeddings": 262144,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]}
        | (flash or {}),
    }
    return Fake(**(values | changes))


def parallel(**changes: Any) -> Fake:
    """vLLM's ParallelConfig, as far as it is read."""
    values = {
        "tensor_parallel_size": 8,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_batch_sharded_sampling": None,
        "enable_dbo": False,
        "worker_cls": "auto",
    }
    return Fake(**(values | changes))


def engine(model: dict[str, Any] | None = None, **changes: Any) -> Fake:
    """vLLM's VllmConfig, as far as it is read. model: changes of its ModelConfig."""
    values = {
        "model_config": Fake(
            **(
                {"dtype": torch.bfloat16, "runner_type": "generate", "multimodal_config": None}
                | (model or {})
            )
        ),
        "use_v2_model_runner": True,
        "cache_config": Fake(cache_dtype="auto"),
        "lora_config": None,
        "kv_transfer_config": None,
        "attention_config": Fake(backend=None),
        "aux_output_config": Fake(enable_return_routed_experts=False),
    }
    return Fake(**(values | changes))


def check_refusal(call: Callable[[], object], key: str, wanted: str, got: str) -> None:
    """The call fails with "KEY: wanted X, got Y", whose parts hold the given ones."""
    with pytest.raises(UnsupportedError) as error:
        call()
    parts = re.fullmatch(r"(.+?): wanted (.+), got (.+)", str(error.value))
    assert parts is not None, str(error.value)
    assert key in parts[1] and wanted in parts[2] and got in parts[3], parts.groups()


@pytest.mark.parametrize(
    ("change", "key", "wanted", "got"),
    [
        ({"tree_buget": 16}, "tree_buget", "tree_budget", "16"),
        ({"draft_sample_method": "probabilistic"}, "draft_sample_method", "one of", "probab"),
        ({"max_model_len": 128}, "max_model_len", "one of", "128"),
        ({"model": None}, "'model'", "path or name", "None"),
        ({"model": ""}, "'model'", "path or name", "''"),
        ({"tree_budget": 0}, "tree_budget", "[1, 255]", "0"),
        ({"tree_budget": 256}, "tree_budget", "[1, 255]", "256"),
        ({"tree_budget": "16"}, "tree_budget", "an integer", "'16'"),
        ({"tree_budget": True}, "tree_budget", "an integer", "True"),
        ({"tree_budget": 1.5}, "tree_budget", "an integer", "1.5"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens", "[1, 7]", "0"),
        ({"num_speculative_tokens": 8}, "num_speculative_tokens", "[1, 7]", "8"),
        ({"num_speculative_tokens": "7"}, "num_speculative_tokens", "an integer", "'7'"),
        ({"tree_spine": 1}, "tree_spine", "true or false", "1"),
        ({"tree_spine": "yes"}, "tree_spine", "true or false", "'yes'"),
        ({SCHEDULE: "x"}, SCHEDULE, "rows", "'x'"),
        ({SCHEDULE: []}, SCHEDULE, "rows", "[]"),
        ({SCHEDULE: [[1, 8]]}, SCHEDULE, "rows", "[[1, 8]]"),
        ({SCHEDULE: [[1, 8, 4.0]]}, SCHEDULE, "rows", "4.0"),
        ({SCHEDULE: [[1, 8, 17]]}, SCHEDULE, "tree_budget = 16", "17"),
        ({SCHEDULE: [[1, 8, -1]]}, SCHEDULE, "in [0", "-1"),
        ({SCHEDULE: [[2, 8, 4]]}, SCHEDULE, "from 1 on", "[2, 8, 4]"),
        ({SCHEDULE: [[1, 4, 4], [4, 8, 2]]}, SCHEDULE, "in order", "[4, 8, 2]"),
        ({SCHEDULE: [[1, 4, 4], [8, 6, 2]]}, SCHEDULE, "in order", "[8, 6, 2]"),
        ({"tree_budget_adapt": 1}, "tree_budget_adapt", "true or false", "1"),
    ],
)
def test_settings(change: dict[str, Any], key: str, wanted: str, got: str) -> None:
    check_refusal(lambda: TreeConfig.from_user(USER | change, BLOCK), key, wanted, got)


@pytest.mark.parametrize(
    ("change", "horizon", "nodes", "spine"),
    [
        ({}, 7, 16, False),
        ({"num_speculative_tokens": None, "tree_budget": None}, 7, 16, False),
        ({"tree_budget": 3}, 3, 3, False),  # deeper positions could never be in the tree
        ({"num_speculative_tokens": 1, "tree_budget": 255, "tree_spine": True}, 1, 255, True),
        ({"tree_budget": None, "tree_spine": None, "tree_budget_adapt": None}, 7, 16, False),
        ({SCHEDULE: [[1, 4, 16], (6, 8, 0)]}, 7, 16, False),
    ],
)
def test_good_settings(change: dict[str, Any], horizon: int, nodes: int, spine: bool) -> None:
    assert TreeConfig.from_user(USER | change, BLOCK) == TreeConfig(horizon, nodes, spine)


def test_a_horizon_beyond_the_budget_is_refused_in_the_frozen_settings() -> None:
    with pytest.raises(UnsupportedError, match="num_speculative_tokens: wanted at most"):
        TreeConfig(8, 7)


@pytest.mark.parametrize(
    "method", ["DDTREE", "DDTree", "dd_tree", "dd-tree", "ddtree ", "dd tree", "ddtre", "ddtrees"]
)
def test_near_misses_of_the_method(method: str) -> None:
    with pytest.raises(UnsupportedError, match=r"'method': wanted 'ddtree', got '" + method):
        config.is_ours(USER | {"method": method})


@pytest.mark.parametrize("method", ["dflash", "ngram", None])
def test_our_keys_with_another_method(method: str | None) -> None:
    user = USER | {"method": method}
    check_refusal(lambda: config.is_ours(user), "tree_budget", "'ddtree'", repr(method))


def test_other_methods_are_not_ours() -> None:
    assert config.is_ours(USER)
    assert not config.is_ours({"method": "ngram", "num_speculative_tokens": 3})
    assert not config.is_ours({})


def test_keys_of_a_speculative_config() -> None:
    assert config.user_keys(None) == {}
    assert config.user_keys("ngram") == {}  # vLLM's to refuse
    given = {"method": "ddtree", "tree-budget": 8, 5: 6}
    assert config.user_keys(given) == {"method": "ddtree", "tree_budget": 8, "5": 6}
    for bad in ('{"method": "ddtree"}', [("method", "ddtree")]):
        check_refusal(lambda b=bad: config.user_keys(b), "speculative_config", "dict", "ddtree")  # type: ignore[misc]
    twice = {"method": "ddtree", "tree-budget": 8, "tree_budget": 9}
    check_refusal(lambda: config.user_keys(twice), "'tree_budget'", "once", "[8, 9]")
    config.user_keys(twice | {"method": "dflash"})


def test_weights_of_the_drafter() -> None:
    config.check_weights([])
    missing = ["fc.weight", "norm.weight", "a.weight", "b.weight"]
    check_refusal(lambda: config.check_weights(missing), "weights", "every", "4 of them")


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.32.0rc1", "1.0.0+cpu"])
def test_vllm_version(version: str) -> None:
    with pytest.raises(UnsupportedError, match=r"vllm: wanted .*0\.32\.0, got '" + version[:4]):
        config.check_vllm_version(version)
    assert not config.supports_vllm(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.0+cu130"])
def test_good_vllm_version(version: str) -> None:
    config.check_vllm_version(version)


@pytest.mark.parametrize(
    ("change", "key", "got"),
    [
        ({"kv_lora_rank": 256}, "kv_lora_rank", "256"),
        ({"kv_lora_rank": None}, "kv_lora_rank", "None"),  # no MLA at all
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim", "32"),
        ({"index_topk": 2048}, "index_topk", "2048"),
        ({"linear_attn_config": {"kda_layers": [1]}}, "linear_attn_config", "kda"),
    ],
)
def test_target(change: dict[str, Any], key: str, got: str) -> None:
    text = target(**change)
    check_refusal(lambda: config.check_target(text), f"{key} of the target", "", got)
    assert not config.has_tree_geometry(text)


@pytest.mark.parametrize(
    ("draft", "key", "wanted", "got"),
    [
        (drafter(architectures=["LlamaForCausalLM"]), "architectures", "DFlashDraftModel", "Llama"),
        (drafter(architectures=None), "architectures", "DFlashDraftModel", "[]"),
        (drafter(hidden_size=4096), "hidden_size", "7168", "4096"),
        (drafter(vocab_size=151936), "vocab_size", "163840", "151936"),
        (drafter(num_target_layers=36), "num_target_layers", "61", "36"),
        (drafter({"target_layer_ids": [1, 61]}), "target_layer_ids", "0 to 60", "61"),
        (drafter({"target_layer_ids": [-1]}), "target_layer_ids", "0 to 60", "-1"),
        (drafter({"target_layer_ids": []}), "target_layer_ids", "a list", "[]"),
        (drafter({"target_layer_ids": None}), "target_layer_ids", "a list", "None"),
        (drafter({"target_layer_ids": [58, 1]}), "target_layer_ids", "in order", "[58, 1]"),
        (drafter({"target_layer_ids": [1, 1]}), "target_layer_ids", "each once", "[1, 1]"),
        (drafter({"target_layer_ids": [True, 2]}), "target_layer_ids", "0 to 60", "True"),
        (drafter({"mask_token_id": True}), "mask_token_id", "163840", "True"),
        (drafter(dflash_config=[7]), "dflash_config", "a dictionary", "[7]"),
        (drafter(dflash_config="x"), "dflash_config", "a dictionary", "'x'"),
        (drafter({"mask_token_id": None}), "mask_token_id", "163840", "None"),
        (drafter({"mask_token_id": 163840}), "mask_token_id", "163840", "163840"),
        (drafter({"sample_from_anchor": True}), "sample_from_anchor", "false", "True"),
        (drafter(max_position_embeddings=4096), "max_position_embeddings", "131072", "4096"),
        (drafter(max_position_embeddings=None), "max_position_embeddings", "131072", "None"),
    ],
)
def test_pair(draft: Fake, key: str, wanted: str, got: str) -> None:
    check_refusal(lambda: config.check_pair(target(), draft, 131072), key, wanted, got)


@pytest.mark.parametrize("block", [None, 1, "8", True])
def test_block_size(block: object) -> None:
    with pytest.raises(UnsupportedError, match="block_size of the drafter"):
        config.draft_block_size(drafter(block_size=block))
    assert config.draft_block_size(drafter({"block_size": 16}, block_size=None)) == 16


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 2),
        ("decode_context_parallel_size", 2),
        ("prefill_context_parallel_size", 2),
        ("enable_expert_parallel", True),
        ("enable_batch_sharded_sampling", True),
        ("enable_dbo", True),
        ("worker_cls", "my.Worker"),
    ],
)
def test_parallel(key: str, value: object) -> None:
    bad = parallel(**{key: value})
    check_refusal(lambda: config.check_parallel(bad, None), key, "'ddtree'", repr(value))


def test_drafter_is_sharded_like_the_target() -> None:
    config.check_parallel(parallel(), None)
    config.check_parallel(parallel(), 8)
    key = "draft_tensor_parallel_size"
    check_refusal(lambda: config.check_parallel(parallel(), 1), key, "8", "1")


VISION = Fake(language_model_only=False)


@pytest.mark.parametrize(
    ("bad", "key", "got"),
    [
        (engine(use_v2_model_runner=False), "VLLM_USE_V2_MODEL_RUNNER", "'V1'"),
        (engine(lora_config=Fake()), "lora_config", "Simple"),
        (engine(kv_transfer_config=Fake()), "kv_transfer_config", "Simple"),
        (engine(watermark_config=Fake()), "watermark_config", "Simple"),
        (engine(attention_config=Fake(backend=Fake(name="X_MLA"))), "attention_backend", "X_MLA"),
        (engine(cache_config=Fake(cache_dtype="fp8")), "kv_cache_dtype", "fp8"),
        (engine(aux_output_config=Fake(enable_return_routed_experts=True)), "routed", "True"),
        (engine({"dtype": torch.float16}), "dtype", "float16"),
        (engine({"runner_type": "pooling"}), "runner", "pooling"),
        (engine({"multimodal_config": VISION}), "language_model_only", "False"),
        (engine({"return_sampling_mask": True}), "return_sampling_mask", "True"),
        (engine({"enable_trace_replay": True}), "enable_trace_replay", "True"),
        (engine({"enable_prompt_embeds": True}), "enable_prompt_embeds", "True"),
        (engine({"uses_mrope": True}), "uses_mrope", "True"),
        (engine({"has_inner_state": True}), "has_inner_state", "True"),
    ],
)
def test_engine(bad: Fake, key: str, got: str) -> None:
    check_refusal(lambda: config.check_engine(bad), key, "'ddtree'", got)


def test_good_engine_and_pair() -> None:
    named = Fake(backend=Fake(name="KDTREE_MLA"))
    config.check_engine(engine())
    config.check_engine(engine(attention_config=named, cache_config=Fake(cache_dtype="bfloat16")))
    config.check_engine(engine({"multimodal_config": Fake(language_model_only=True)}))
    config.check_target(target())
    config.check_pair(target(), drafter(), max_model_len=262144)
    assert config.has_tree_geometry(target())


def test_device() -> None:
    config.check_device("cpu", has_triton=True)
    check_refusal(lambda: config.check_device("xpu", True), "device", "cuda, or cpu", "xpu")
    check_refusal(lambda: config.check_device("cpu", False), "triton", "pip install", "None")


def test_gpu() -> None:
    built = "cpu;cuda:90a,100f,120f"
    for capability in ("9.0", "10.3", "12.0"):
        config.check_device("cuda", True, capability, built)
    for capability, name in (("8.9", "8.9"), ("8.0", "8.0"), (None, "None")):
        check_refusal(
            lambda c=capability: config.check_device("cuda", True, c, built),  # type: ignore[misc]
            "device",
            "9.0 or higher",
            name,
        )
    for info in ("cpu", "cpu;cuda:120f", None):
        check_refusal(
            lambda i=info: config.check_device("cuda", True, "9.0", i),  # type: ignore[misc]
            "native library",
            "KDTREE_CUDA=ON",
            info or "nothing",
        )


@pytest.mark.parametrize("cache", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
def test_caches_on_cuda(cache: str) -> None:
    config.check_engine(engine(cache_config=Fake(cache_dtype=cache)), "cuda")


def test_dtypes_on_cuda() -> None:
    float32 = engine({"dtype": torch.float32})
    config.check_engine(float32, "cpu")
    check_refusal(lambda: config.check_engine(float32, "cuda"), "dtype", "bfloat16", "float32")
    e5m2 = engine(cache_config=Fake(cache_dtype="fp8_e5m2"))
    check_refusal(lambda: config.check_engine(e5m2, "cuda"), "kv_cache_dtype", "fp8", "fp8_e5m2")


def test_the_stock_platform_serves_where_triton_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "is_cpu_build", lambda: True)
    assert platform.platform_plugin() == platform.CPU_PLATFORM
    monkeypatch.setattr(platform, "has_triton", lambda: False)
    assert platform.platform_plugin() is None
