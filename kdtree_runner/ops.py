"""The operators in Torch: torch.ops.kdtree.*, and their typed wrappers.

What they do and take is said in kdtree_kernels.py, whose functions these register. CPU and CUDA
tensors go to the same C interface.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from kdtree_runner import kdtree_kernels as kernels

LIB = torch.library.Library("kdtree", "FRAGMENT")
LSE_WORDS = kernels.LSE_WORDS
# The functions themselves, for what runs between CUDA graphs, where nothing traces: torch's
# dispatcher would cost the host more than the call.
direct = kernels
P = ParamSpec("P")


def _operator(*outputs: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a function as the operator of its name, for CPU and CUDA; `outputs` are written to.

    What comes in its place calls torch.ops.kdtree.<name>, whose fake only looks at devices.
    """

    def register(function: Callable[P, None]) -> Callable[P, None]:
        name = function.__name__
        LIB.define(name + torch.library.infer_schema(function, mutates_args=outputs))
        for key in ("CPU", "CUDA"):
            LIB.impl(name, function, key)
        torch.library.register_fake(f"kdtree::{name}", _fake(function), lib=LIB)
        overload = getattr(torch.ops.kdtree, name).default

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            overload(*args, **kwargs)

        return call

    return register


def _fake(function: Callable[..., None]) -> Callable[..., None]:
    """A fake that refuses tensors of several kinds of devices.

    One meta tensor among others is enough for Torch's dispatcher to call the fake alone.
    """
    signature = inspect.signature(function)

    def fake(*args: Any, **kwargs: Any) -> None:
        devices = {}
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            for tensor in value if isinstance(value, list) else (value,):
                if isinstance(tensor, Tensor):
                    devices[tensor.device.type] = name
        if len(devices) > 1:
            found = ", ".join(f"{name} on {device}" for device, name in devices.items())
            raise ValueError(f"all tensors must be on one kind of device, got {found}")

    return fake


_TREE_OUTPUTS = (
    *("tokens", "parents", "depths", "ancestors"),
    *("positions", "first_child", "next_sibling", "scores"),
)

build_candidates = _operator("values", "ids", "lse")(kernels.build_candidates)
build_select = _operator(*_TREE_OUTPUTS)(kernels.build_select)
build_ddtree = _operator(*_TREE_OUTPUTS)(kernels.build_ddtree)
verify_attn_plan = _operator("workspace")(kernels.verify_attn_plan)
verify_attn = _operator("out", "lse", "workspace")(kernels.verify_attn)
tree_place = _operator("positions", "tree_rows", "tokens", "row_positions")(kernels.tree_place)
tree_accept = _operator(
    *("path", "emitted", "num_emitted"),
    *("positions", "num_sampled", "num_rejected", "node_counts"),
)(kernels.tree_accept)
kv_commit = _operator("layers")(kernels.kv_commit)
verify_attn_workspace = kernels.verify_attn_workspace
