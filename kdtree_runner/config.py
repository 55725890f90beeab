"""The settings of DDTree speculative decoding, as users write them and as an engine reads them.

What is refused of the two models and of vLLM's engine stands in model_pair.py and engine_checks.py,
whose names can be had from here too. Nothing here or there imports vLLM: the checks read plain
attributes, so that a config file alone will do.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kdtree_runner.engine_checks import (
    ATTENTION_BACKEND,
    CUDA_DTYPES,
    DTYPES,
    FP8_CACHES,
    METHOD,
    MIN_CAPABILITY,
    check_device,
    check_engine,
    check_parallel,
    check_ray,
)
from kdtree_runner.model_pair import (
    KV_LORA_RANK,
    QK_ROPE_HEAD_DIM,
    check_amplitude,
    check_pair,
    check_target,
    check_weights,
    draft_block_size,
    has_tree_geometry,
    rope_with_amplitude,
    text_config,
)
from kdtree_runner.refusal import UnsupportedError
from kdtree_runner.refusal import integer as _integer
from kdtree_runner.refusal import refuse as _refuse
from kdtree_runner.sharding import check_sharding

__all__ = [
    "ATTENTION_BACKEND",
    "CUDA_DTYPES",
    "DEFAULT_BUDGET",
    "DTYPES",
    "FP8_CACHES",
    "KV_LORA_RANK",
    "MAX_HORIZON",
    "MAX_NODES",
    "MAX_TOPK",
    "METHOD",
    "MIN_CAPABILITY",
    "OWN_KEYS",
    "PASSED_KEYS",
    "QK_ROPE_HEAD_DIM",
    "SUPPORTED_VLLM",
    "TREE_KEYS",
    "TreeConfig",
    "UnsupportedError",
    "check_device",
    "check_engine",
    "check_pair",
    "check_parallel",
    "check_ray",
    "check_target",
    "check_vllm_version",
    "check_weights",
    "draft_block_size",
    "has_tree_geometry",
    "is_ours",
    "rope_with_amplitude",
    "supports_vllm",
    "text_config",
    "user_keys",
]

SUPPORTED_VLLM = ("0.32.0",)

MAX_NODES = 255  # csrc/include/kdtree.h, KDTREE_MAX_NODES
MAX_HORIZON = 32  # KDTREE_MAX_DEPTH
MAX_TOPK = 64  # KDTREE_MAX_TOPK
DEFAULT_BUDGET = (
    16  # useful range on Kimi K2.6 at batch 1 is 8 to 16: beyond it expert reads cost more
)

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
        amplitude = user.get("draft_rope_amplitude")
        if amplitude is not None:
            check_amplitude(amplitude)
        spine, adapt = user.get("tree_spine"), user.get("tree_budget_adapt")
        return cls(
            min(horizon, budget),
            budget,
            cls.spine if spine is None else spine,
            cls.adapt if adapt is None else adapt,
        )


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
