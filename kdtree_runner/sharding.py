"""Do a target and its drafter divide among the ranks? Sums over their config files alone.

vLLM would find out late, inside a layer, by an assertion without a name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kdtree_runner.refusal import refuse

MAX_HEADS = 128  # of a rank: csrc/include/kdtree.h, num_heads
SPLIT_KEYS = (
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
    *("intermediate_size", "moe_intermediate_size"),
)


def check_sharding(text: Any, draft: Any, num_ranks: int) -> None:
    """Refuse a number of ranks that the pair does not divide by.

    text, draft: Hugging Face configs of target and drafter. num_ranks: tensor_parallel_size.
    """
    for owner, config in (("target", text), ("drafter", draft)):
        for key, size, unit in _divided(owner, config):
            if size is not None and size % (num_ranks * unit):
                what = "a multiple of tensor_parallel_size"
                what += f" ({num_ranks})" + (f" x {unit}" if unit > 1 else "")
                refuse(f"{key} of the {owner}", what, size)
    heads = getattr(text, "num_attention_heads", None)
    if heads is not None and heads // num_ranks > MAX_HEADS:
        refuse("num_attention_heads of the target", f"at most {MAX_HEADS} a rank", heads)
    shared = getattr(draft, "num_key_value_heads", None)
    if shared is not None and shared % num_ranks and num_ranks % shared:
        what = f"a multiple or a divisor of tensor_parallel_size ({num_ranks})"
        refuse("num_key_value_heads of the drafter", what, shared)


def _divided(owner: str, config: Any) -> Iterable[tuple[str, int | None, int]]:
    """Sizes that are split among ranks: key, size, and the unit that stays whole.

    Experts are all on every rank; what is split are their columns, in whole quantization groups.
    Vocabularies are padded by vLLM, so they divide by anything.
    """
    yield "num_attention_heads", getattr(config, "num_attention_heads", None), 1
    yield "intermediate_size", getattr(config, "intermediate_size", None), 1
    if owner == "target" and getattr(config, "n_routed_experts", None):
        yield "moe_intermediate_size", config.moe_intermediate_size, group_size(config) or 1


def group_size(config: Any) -> int | None:
    """Weights that share a scale in a compressed-tensors checkpoint; None where they do not."""
    quantization = getattr(config, "quantization_config", None) or {}
    groups = quantization.get("config_groups") or {}
    found = [(group.get("weights") or {}).get("group_size") for group in groups.values()]
    return max((size for size in found if size), default=None)


def rank_share(text: Any, num_ranks: int) -> dict[str, int]:
    """Sizes of one rank's part of a target, by the keys of its config.

    A model of these sizes does on one GPU what a rank does, but for the exchange between ranks.
    """
    shares = {key: getattr(text, key, None) for key in SPLIT_KEYS}
    return {key: max(size // num_ranks, 1) for key, size in shares.items() if size}
