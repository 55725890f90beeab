"""Kimi K2.6 from its config files alone: accepted, divided among ranks, refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from kdtree_runner.config import TreeConfig, UnsupportedError, text_config
from kdtree_runner.sharding import check_sharding, group_size, rank_share

FILES = Path(__file__).parent / "data" / "kimi_k26"
USER = {"method": "ddtree", "model": "z-lab/Kimi-K2.6-DFlash", "tree_budget": 16}


def load(part: str) -> dict[str, Any]:
    return json.loads((FILES / part / "config.json").read_text())


def accept(
    user: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    ranks: int = 8,
) -> TreeConfig:
    """TreeConfig of the pair with these changes."""
    target, drafter = load("target"), load("drafter")
    target["text_config"] |= text or {}
    return TreeConfig.from_files(USER | (user or {}), target, drafter | (draft or {}), 32768, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_the_pair_is_accepted(ranks: int) -> None:
    assert accept(ranks=ranks) == TreeConfig(horizon=7, num_nodes=16)


def test_a_text_only_config_is_accepted() -> None:
    target, drafter = load("target"), load("drafter")
    inner = TreeConfig.from_files(USER, target["text_config"], drafter, 32768, 8)
    assert inner == accept()


def test_the_wrapper_says_the_quantization() -> None:
    target = load("target")
    del target["text_config"]["quantization_config"]
    assert group_size(text_config(target)) == 32


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15])
def test_heads_do_not_divide(ranks: int) -> None:
    with pytest.raises(UnsupportedError, match="num_attention_heads of the target: wanted") as stop:
        accept(ranks=ranks)
    assert f"a multiple of tensor_parallel_size ({ranks}), got 64" in str(stop.value)


@pytest.mark.parametrize(
    ("text", "draft", "message"),
    [
        ({"intermediate_size": 18436}, {}, "intermediate_size of the target: wanted a multiple"),
        (
            {"moe_intermediate_size": 2048 + 128},
            {},
            r"moe_intermediate_size of the target: wanted .* \(8\) x 32, got 2176",
        ),
        ({}, {"num_attention_heads": 60}, "num_attention_heads of the drafter"),
        ({}, {"intermediate_size": 18436}, "intermediate_size of the drafter"),
        (
            {},
            {"num_key_value_heads": 6},
            r"num_key_value_heads of the drafter: .* divisor .* \(8\)",
        ),
        ({"num_attention_heads": 2048}, {"num_attention_heads": 64}, "at most 128 a rank"),
        ({"kv_lora_rank": 256}, {}, "kv_lora_rank of the target"),
        ({}, {"hidden_size": 4096}, "hidden_size of the drafter"),
    ],
)
def test_what_does_not_fit_is_named(
    text: dict[str, Any], draft: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        accept(text=text, draft=draft)


def test_unquantized_experts_need_no_whole_groups() -> None:
    text = text_config(load("target"))
    text.quantization_config = None
    text.moe_intermediate_size = 2048 + 128
    check_sharding(text, text_config(load("drafter")), 8)


def test_a_rank_of_eight() -> None:
    assert rank_share(text_config(load("target")), 8) == {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 20480,
        "intermediate_size": 2304,
        "moe_intermediate_size": 256,
    }
    assert rank_share(text_config(load("drafter")), 16)["num_key_value_heads"] == 1


@pytest.mark.parametrize("amplitude", [0, -1.0, float("nan"), float("inf"), True, "1.4"])
def test_amplitudes_that_are_none(amplitude: object) -> None:
    with pytest.raises(UnsupportedError, match="draft_rope_amplitude: wanted a number above 0"):
        accept({"draft_rope_amplitude": amplitude})


def test_an_amplitude_needs_yarn() -> None:
    assert accept({"draft_rope_amplitude": 1.4158883}) == accept()
    with pytest.raises(UnsupportedError, match="wanted a drafter with yarn"):
        accept({"draft_rope_amplitude": 1.0}, draft={"rope_scaling": None})


def test_vllm_reads_the_wrapper_as_we_do() -> None:
    config = pytest.importorskip("vllm.transformers_utils.config")
    found = config.get_config(str(FILES / "target"), trust_remote_code=False)
    text, ours = config.get_hf_text_config(found), text_config(load("target"))
    assert type(found).__name__ == "Kimi_K25Config"
    for key in ("kv_lora_rank", "hidden_size", "num_hidden_layers", "moe_intermediate_size"):
        assert getattr(text, key) == getattr(ours, key)
    draft = config.get_config(str(FILES / "drafter"), trust_remote_code=False)
    for ranks in (1, 2, 4, 8, 16):
        check_sharding(text, draft, ranks)


def test_configs_are_not_changed() -> None:
    target, drafter = load("target"), load("drafter")
    before = copy.deepcopy((target, drafter))
    TreeConfig.from_files(USER | {"draft_rope_amplitude": 1.0}, target, drafter, 32768, 8)
    assert (target, drafter) == before
