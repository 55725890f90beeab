"""The settings of DDTree speculative decoding, and every refusal.

Nothing here imports vLLM: the checks read plain attributes, so that they run on a config file alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SUPPORTED_VLLM = ("0.32.0",)
METHOD = "ddtree"
ATTENTION_BACKEND = "KDTREE_MLA"

MAX_NODES = 255  # csrc/include/kdtree.h, KDTREE_MAX_NODES
MAX_HORIZON = 32  # KDTREE_MAX_DEPTH
MAX_TOPK = 64  # KDTREE_MAX_TOPK
DEFAULT_BUDGET = (
    16  # useful range on Kimi K2.6 at batch 1 is 8 to 16: beyond it expert reads cost more
)

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
_GEOMETRY = {"kv_lora_rank": KV_LORA_RANK, "qk_rope_head_dim": QK_ROPE_HEAD_DIM}

# Keys of a speculative config that are ours, and vLLM's keys that keep their meaning for the drafter.
OWN_KEYS = ("method", "model", "num_speculative_tokens", "tree_budget", "tree_spine")
PASSED_KEYS = (
    "draft_tensor_parallel_size",
    "quantization",
    "revision",
    "code_revision",
    "max_model_len",
    "attention_backend",
    "enforce_eager",
    "draft_load_config",
    "num_speculative_tokens_per_batch_size",
)


class UnsupportedError(ValueError):
    """A setting or model that DDTree does not serve: names the key, what was wanted and what came."""


def _refuse(key: str, wanted: str, got: object) -> None:
    raise UnsupportedError(f"{key}: wanted {wanted}, got {got!r}")


def _integer(key: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        _refuse(key, f"an integer in [{low}, {high}]", value)
    assert isinstance(value, int)
    return value


def check_vllm_version(version: str) -> None:
    """The one place that looks at vLLM's version. version: as in `vllm.__version__`."""
    if version.split("+")[0] not in SUPPORTED_VLLM:
        _refuse("vllm", f"one of the supported versions {', '.join(SUPPORTED_VLLM)}", version)


@dataclass(frozen=True)
class TreeConfig:
    """What one engine needs to know of its draft trees.

    horizon: L, positions the drafter fills in one pass, in [1, 32].
    num_nodes: N, nodes of a tree without its root (the budget), in [1, 255], and at least L.
    spine: whether the chain of each position's best token is always in the tree.
    """

    horizon: int
    num_nodes: int
    spine: bool = False

    def __post_init__(self) -> None:
        _integer("num_speculative_tokens", self.horizon, 1, MAX_HORIZON)
        _integer("tree_budget", self.num_nodes, 1, MAX_NODES)
        if not isinstance(self.spine, bool):
            _refuse("tree_spine", "true or false", self.spine)
        if self.horizon > self.num_nodes:
            _refuse(
                "num_speculative_tokens", f"at most tree_budget ({self.num_nodes})", self.horizon
            )

    @property
    def topk(self) -> int:
        """K, candidates kept a position. A prefix of rank r is among the N best only if r <= N."""
        return min(self.num_nodes, MAX_TOPK)

    @property
    def num_tokens(self) -> int:
        """T = 1 + N, tokens the target verifies for a request."""
        return 1 + self.num_nodes

    @classmethod
    def from_user(cls, user: Mapping[str, Any], block_size: int) -> TreeConfig:
        """From a speculative config as users write it.

        user: the dict, keys with underscores. block_size: the drafter's, anchor included.
        A horizon above the budget is cut to it: deeper nodes could never be in the tree.
        """
        unknown = sorted(set(user) - set(OWN_KEYS) - set(PASSED_KEYS))
        if unknown:
            known = ", ".join((*OWN_KEYS, *PASSED_KEYS))
            _refuse(f"speculative_config key {unknown[0]!r}", f"one of {known}", user[unknown[0]])
        if not isinstance(user.get("model"), str) or not user["model"]:
            _refuse(
                "speculative_config key 'model'", "the drafter's path or name", user.get("model")
            )
        longest = min(block_size - 1, MAX_HORIZON)
        horizon = user.get("num_speculative_tokens")
        horizon = longest if horizon is None else horizon
        horizon = _integer("num_speculative_tokens", horizon, 1, longest)
        budget = user.get("tree_budget")
        budget = DEFAULT_BUDGET if budget is None else budget
        budget = _integer("tree_budget", budget, 1, MAX_NODES)
        return cls(min(horizon, budget), budget, user.get("tree_spine", cls.spine))


def draft_block_size(draft: Any) -> int:
    """The drafter's block size (anchor included) from its Hugging Face config."""
    block = getattr(draft, "block_size", None)
    if block is None:
        block = _dflash(draft).get("block_size")
    return _integer("block_size of the drafter", block, 2, 1 + 4096)


def _dflash(draft: Any) -> dict[str, Any]:
    return dict(getattr(draft, "dflash_config", None) or {})


def has_tree_geometry(text: Any) -> bool:
    """Whether KDTREE_MLA serves a target's attention. text: its Hugging Face text config."""
    dense = getattr(text, "index_topk", None) is None  # else DeepSeek sparse attention
    return dense and all(getattr(text, key, None) == wanted for key, wanted in _GEOMETRY.items())


def check_target(text: Any) -> None:
    """Refuse a target whose attention is not MLA of the DeepSeek geometry.

    text: the target's Hugging Face text config.
    """
    for key, wanted in _GEOMETRY.items():
        got = getattr(text, key, None)
        if got != wanted:
            _refuse(
                f"{key} of the target", f"{wanted} (multi-head latent attention, 512 + 64)", got
            )
    sparse = getattr(text, "index_topk", None)
    if sparse is not None:
        _refuse("index_topk of the target", "none: sparse attention sees no tree", sparse)


def check_pair(text: Any, draft: Any) -> None:
    """Refuse a drafter that does not fit the target. text, draft: their Hugging Face configs."""
    names = list(getattr(draft, "architectures", None) or [])
    if "DFlashDraftModel" not in names:
        _refuse("architectures of the drafter", "DFlashDraftModel", names)
    for key in ("hidden_size", "vocab_size"):
        wanted, got = getattr(text, key), getattr(draft, key, None)
        if got != wanted:
            _refuse(f"{key} of the drafter", f"the target's {wanted}", got)
    flash = _dflash(draft)
    layers = text.num_hidden_layers
    ids = flash.get("target_layer_ids")
    if not isinstance(ids, (list, tuple)) or not ids:
        _refuse("dflash_config.target_layer_ids of the drafter", "a list of target layers", ids)
    assert ids is not None
    if not all(isinstance(i, int) and 0 <= i < layers for i in ids):
        wanted = f"layers of the target, 0 to {layers - 1}"
        _refuse("dflash_config.target_layer_ids of the drafter", wanted, ids)
    counted = getattr(draft, "num_target_layers", None)
    if counted is not None and counted != layers:
        _refuse("num_target_layers of the drafter", f"the target's {layers} layers", counted)
    mask = flash.get("mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < text.vocab_size:
        wanted = f"a token id below the vocabulary of {text.vocab_size}"
        _refuse("dflash_config.mask_token_id of the drafter", wanted, mask)
    if flash.get("sample_from_anchor"):
        _refuse("dflash_config.sample_from_anchor of the drafter", "false", True)


# Settings of vLLM's ParallelConfig and the only value that DDTree serves.
_PARALLEL = {
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "enable_batch_sharded_sampling": False,
    "enable_dbo": False,
}


def check_parallel(parallel: Any) -> None:
    """Refuse parallel modes in which a tree's rows would lie on different ranks.

    parallel: vLLM's ParallelConfig.
    """
    for key, wanted in _PARALLEL.items():
        got = getattr(parallel, key, wanted)
        if got is not None and got != wanted:  # None: vLLM has not decided
            _refuse(key, f"{wanted!r} with method {METHOD!r}", got)


def check_engine(config: Any) -> None:
    """Refuse what only a whole engine config shows. config: vLLM's VllmConfig."""
    model = config.model_config
    if not config.use_v2_model_runner:
        _refuse("VLLM_USE_V2_MODEL_RUNNER", f"the V2 model runner with method {METHOD!r}", "V1")
    absent = {
        "lora_config": config.lora_config,
        "kv_transfer_config": config.kv_transfer_config,
        "watermark_config": getattr(config, "watermark_config", None),
    }
    for key, got in absent.items():
        if got is not None:
            _refuse(key, f"none with method {METHOD!r}", type(got).__name__)
    for key in (
        "return_sampling_mask",
        "enable_trace_replay",
        "enable_prompt_embeds",
        "uses_mrope",
    ):
        if getattr(model, key, False):
            _refuse(key, f"false with method {METHOD!r}", True)
    backend = getattr(config.attention_config.backend, "name", None)
    if backend not in (None, ATTENTION_BACKEND):
        _refuse("attention_config.backend", f"{ATTENTION_BACKEND} with method {METHOD!r}", backend)
