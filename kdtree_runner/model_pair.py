"""What the config files of a target and its drafter say, and the refusal of a pair by them.

Nothing here imports vLLM: the checks read plain attributes, so that a config file alone will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kdtree_runner.refusal import integer, refuse

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
_GEOMETRY = {"kv_lora_rank": KV_LORA_RANK, "qk_rope_head_dim": QK_ROPE_HEAD_DIM}


def draft_block_size(draft: Any) -> int:
    """The drafter's block size (anchor included) from its Hugging Face config."""
    block = getattr(draft, "block_size", None)
    if block is None:
        block = _dflash(draft).get("block_size")
    return integer("block_size of the drafter", block, 2, 1 + 4096)


def _dflash(draft: Any) -> dict[str, Any]:
    flash = getattr(draft, "dflash_config", None)
    if flash is not None and not isinstance(flash, Mapping):
        refuse("dflash_config of the drafter", "a dictionary", flash)
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


MAX_AMPLITUDE = 100


def rope_with_amplitude(draft: Any, amplitude: object) -> dict[str, Any]:
    """The drafter's rotary parameters with this factor on cosines and sines.

    Yarn's own factor is 0.1 ln(factor) + 1. A config that names both mscale and mscale_all_dim
    means their quotient, which older engines did not read: which of the two a drafter was trained
    with, its checkpoint does not say. A wrong one costs acceptance, never correctness.
    """
    rope = getattr(draft, "rope_parameters", None) or getattr(draft, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind != "yarn":
        refuse("draft_rope_amplitude", "a drafter with yarn rotary positions for it", kind)
    return {**rope, "attention_factor": check_amplitude(amplitude)}


def check_amplitude(amplitude: object) -> float:
    """Refuse what no drafter's cosines and sines are scaled by. Yarn's own factors are below 3."""
    good = isinstance(amplitude, (int, float)) and not isinstance(amplitude, bool)
    if not good or not 0 < amplitude <= MAX_AMPLITUDE:  # type: ignore[operator]
        refuse("draft_rope_amplitude", f"a number above 0, at most {MAX_AMPLITUDE}", amplitude)
    return float(amplitude)  # type: ignore[arg-type]


# Of the target's config: layers whose tokens do not see all their ancestors by attention.
_OTHER_ATTENTION = {"index_topk": "sparse attention", "linear_attn_config": "recurrent layers"}


def has_tree_geometry(text: Any) -> bool:
    """Whether KDTREE_MLA serves a target's attention. text: its Hugging Face text config."""
    pure = all(getattr(text, key, None) is None for key in _OTHER_ATTENTION)
    return pure and all(getattr(text, key, None) == wanted for key, wanted in _GEOMETRY.items())


def check_target(text: Any) -> None:
    """Refuse a target whose attention is not MLA of the DeepSeek geometry.

    text: the target's Hugging Face text config.
    """
    for key, wanted in _GEOMETRY.items():
        got = getattr(text, key, None)
        if got != wanted:
            refuse(f"{key} of the target", f"{wanted} (multi-head latent attention, 512 + 64)", got)
    for key, what in _OTHER_ATTENTION.items():
        got = getattr(text, key, None)
        if got is not None:
            refuse(f"{key} of the target", f"none: a tree cannot be verified by {what}", got)


def check_pair(text: Any, draft: Any, max_model_len: int) -> None:
    """Refuse a drafter that does not fit the target.

    text, draft: their Hugging Face configs. max_model_len: the engine's, in tokens.
    """
    names = list(getattr(draft, "architectures", None) or [])
    if "DFlashDraftModel" not in names:
        refuse("architectures of the drafter", "DFlashDraftModel", names)
    for key in ("hidden_size", "vocab_size"):
        wanted, got = getattr(text, key), getattr(draft, key, None)
        if got != wanted:
            refuse(f"{key} of the drafter", f"the target's {wanted}", got)
    flash = _dflash(draft)
    layers = text.num_hidden_layers
    ids = flash.get("target_layer_ids")
    if not isinstance(ids, (list, tuple)) or not ids:
        refuse("dflash_config.target_layer_ids of the drafter", "a list of target layers", ids)
    assert ids is not None
    # vLLM hands the drafter each layer's output once and in the order of the layers.
    known = all(type(i) is int and 0 <= i < layers for i in ids)
    if not known or list(ids) != sorted(set(ids)):
        wanted = f"layers of the target, 0 to {layers - 1}, in order and each once"
        refuse("dflash_config.target_layer_ids of the drafter", wanted, ids)
    counted = getattr(draft, "num_target_layers", None)
    if counted is not None and counted != layers:
        refuse("num_target_layers of the drafter", f"the target's {layers} layers", counted)
    mask = flash.get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < text.vocab_size:
        wanted = f"a token id below the vocabulary of {text.vocab_size}"
        refuse("dflash_config.mask_token_id of the drafter", wanted, mask)
    if flash.get("sample_from_anchor"):
        refuse("dflash_config.sample_from_anchor of the drafter", "false", True)
    # Past it the drafter would read its rotary tables out of bounds: vLLM's V2 runner has no gate.
    positions = getattr(draft, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < max_model_len:
        wanted = f"at least max_model_len ({max_model_len}); lower --max-model-len"
        refuse("max_position_embeddings of the drafter", wanted, positions)


def check_weights(missing: Sequence[str]) -> None:
    """Refuse a drafter whose files lack weights. missing: their names in a checkpoint."""
    if missing:
        named = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        got = f"no {named} ({len(missing)} of them)"
        refuse("weights of the drafter", "every weight of its layers in its files", got)
