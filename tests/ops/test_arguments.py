"""What every function of kdtree_kernels.py refuses before the library sees it, by name."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kdtree_runner import kdtree_kernels as kernels
from kdtree_runner import ops

B, N, L, K, V, R = 2, 4, 3, 4, 9, 5
T, A = 1 + N, 1 + L
ROWS = B * T


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def int64(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def starts(size: int) -> Tensor:
    return torch.arange(0, B * size + 1, size, dtype=torch.int32)


def tree() -> dict:
    return {
        "spine": True,
        "chain_only": torch.zeros(R, dtype=torch.bool),
        "tree_rows": torch.tensor([3, 0], dtype=torch.int32),
        "base": int64(B),
        "tokens": int64(B, N),
        "parents": int32(R, T),
        "depths": int32(R, T),
        "ancestors": int32(R, T, A),
        "positions": int64(B, T),
        "first_child": int32(R, T),
        "next_sibling": int32(R, T),
        "scores": int64(B, N),
    }


def build_candidates() -> dict:
    rows = B * L
    scratch = {"values": torch.zeros(rows, K), "ids": int32(rows, K), "lse": int64(rows, 3)}
    return {"logits": torch.randn(rows, V), **scratch, "vocab_offset": 0}


def build_select() -> dict:
    call = build_candidates()
    ops.build_candidates(**call)
    return {**{n: call[n][None] for n in ("values", "ids", "lse")}, "horizon": L, **tree()}


def build_ddtree() -> dict:
    return {"logits": torch.randn(B, L, V), "topk": K, **tree()}


def tree_place() -> dict:
    return {
        "query_start_loc": starts(T),
        "row_start": starts(T),
        "slots": torch.tensor([3, 0]),
        "prompt_lens": int32(R),
        "depths": int32(R, T),
        "input_ids": int32(ROWS),
        "positions": int64(ROWS),
        "tree_rows": int32(B + 1),
        "tokens": int64(ROWS),
        "row_positions": int64(ROWS),
    }


def tree_accept() -> dict:
    return {
        "tokens": int64(ROWS),
        "targets": int64(ROWS),
        "row_start": starts(T),
        "tree_rows": torch.tensor([3, -1], dtype=torch.int32),
        "parents": int32(R, T),
        "path": int32(B, A),
        "emitted": int64(B, A),
        "num_emitted": int32(B),
        "query_start_loc": starts(T),
        "slots": torch.tensor([3, 0]),
        "prompt_lens": int32(R),
        "positions": int64(ROWS),
        "num_sampled": int32(B),
        "num_rejected": int32(B),
        "node_counts": int32(2, T),
    }


def kv_commit() -> dict:
    return {
        "layers": [torch.zeros(3, 4, 6), torch.zeros(3, 4, 6)],
        "slots": torch.arange(ROWS),
        "query_start_loc": starts(T),
        "path": torch.tensor([[0, 2, 4, 4]] * B, dtype=torch.int32),
        "num_emitted": torch.tensor([3, 3], dtype=torch.int32),
    }


def plain_kv_commit() -> dict:
    return kv_commit() | {"layers": [torch.zeros(ROWS, 6)], "slots": None}


def verify_attn() -> dict:
    ancestors = int32(R, T, A)
    return {
        "q": torch.randn(ROWS, 2, 576),
        "kv_cache": torch.randn(4, 8, 576),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seq_lens": torch.tensor([16, 9], dtype=torch.int32),
        "query_start_loc": starts(T),
        "max_query_len": T,
        "tree_rows": torch.tensor([3, -1], dtype=torch.int32),
        "depths": int32(R, T),
        "ancestors": ancestors,
        "softmax_scale": 0.1,
        "kv_scale": 1.0,
        "out": torch.empty(ROWS, 2, 512),
        "lse": torch.empty(ROWS, 2),
        "workspace": torch.empty(8, dtype=torch.uint8),
    }


def verify_attn_plan() -> dict:
    call = verify_attn()
    names = ("block_table", "seq_lens", "query_start_loc", "max_query_len")
    names += ("tree_rows", "depths", "ancestors", "workspace")
    dtypes = {"q_dtype": torch.float32, "kv_dtype": torch.float32}
    sizes = {"num_tokens": ROWS, "num_heads": 2, **dtypes, "page_size": 8}
    return {**sizes, **{name: call[name] for name in names}}


MAKERS: list[Callable[[], dict]] = [
    build_candidates,
    build_select,
    build_ddtree,
    tree_place,
    tree_accept,
    kv_commit,
    verify_attn,
    verify_attn_plan,
]
TENSORS = [
    (make, name)
    for make in MAKERS
    for name, value in make().items()
    if isinstance(value, (Tensor, list))
]


def refused(make: Callable[[], dict], message: str, **changes: object) -> None:
    """A valid call with `changes` is a ValueError, called directly and through Torch."""
    function = make.__name__.removeprefix("plain_")
    for module in (kernels, ops):
        getattr(module, function)(**make())
        with pytest.raises(ValueError, match=message):
            getattr(module, function)(**make() | changes)


@pytest.mark.parametrize("make, name", TENSORS)
def test_one_tensor_on_another_device(make: Callable[[], dict], name: str) -> None:
    """A meta tensor: its pointer is NULL, which in place of an optional one means "not given"."""
    value = make()[name]
    if isinstance(value, list):
        refused(make, rf"{name}.* on ", **{name: [value[0], value[1].to("meta")]})
        return
    moved = value.to("meta")
    function = make.__name__
    with pytest.raises(ValueError, match=rf"\b{name} on meta"):
        getattr(ops, function)(**make() | {name: moved})
    # The first tensor may be the one that the others are held against.
    with pytest.raises(ValueError, match=r"^\w+ must be on .*, got (cpu|meta)"):
        getattr(kernels, function)(**make() | {name: moved})


def test_the_device_is_named() -> None:
    with pytest.raises(ValueError, match=r"slots must be on cpu, .* got meta"):
        kernels.tree_place(**tree_place() | {"slots": int64(B).to("meta")})
    on_meta = {name: tensor.to("meta") for name, tensor in tree_place().items()}
    with pytest.raises(ValueError, match="positions must be on the CPU or on a CUDA device"):
        kernels.tree_place(**on_meta)
    layers = [torch.zeros(3, 4, 6), torch.zeros(3, 4, 6, device="meta")]
    with pytest.raises(ValueError, match=r"layers\[1\] must be on cpu, .* got meta"):
        kernels.KVCommit(layers, paged=True)


@pytest.mark.parametrize("make, name", TENSORS)
def test_a_dimension_too_few(make: Callable[[], dict], name: str) -> None:
    value = make()[name]
    flat = [t[0] for t in value] if isinstance(value, list) else value.flatten()[0]
    refused(make, name, **{name: flat})


@pytest.mark.parametrize(
    "make, changes, message",
    [
        (build_candidates, {"logits": torch.zeros(6, V).half()}, "logits .*float32 or .*bfloat16 "),
        (build_candidates, {"logits": torch.zeros(V, 6).T}, "logits must be .* contiguous rows"),
        (build_ddtree, {"logits": torch.zeros(B, V, L).transpose(1, 2)}, "logits must be .* rows"),
        (build_ddtree, {"logits": torch.zeros(L, B, V).transpose(0, 1)}, "logits must be .* rows"),
        (verify_attn, {"block_table": int32(1, 2)}, "block_table must be .*at least 2 .*1, 2"),
        (verify_attn_plan, {"block_table": int32(1, 2)}, "block_table must be .*at least 2 "),
        (verify_attn, {"workspace": torch.zeros(8)}, "workspace must be torch.uint8"),
        (verify_attn, {"workspace": torch.zeros(8, dtype=torch.uint8)[::2]}, "workspace must be"),
        (verify_attn_plan, {"workspace": torch.zeros(8)}, "workspace must be torch.uint8"),
        (verify_attn_plan, {"q_dtype": torch.float16}, "q_dtype must be one of"),
        (verify_attn, {"q": torch.zeros(ROWS, 2, 576).half()}, "q must be .*float32 or .*bfloat16"),
        (tree_place, {"prompt_lens": int32(R - 1)}, r"prompt_lens must be torch.int32 \[5\]"),
        (tree_accept, {"prompt_lens": int32(R + 1)}, r"prompt_lens must be torch.int32 \[5\]"),
    ],
)
def test_shapes_and_types(make: Callable[[], dict], changes: dict, message: str) -> None:
    refused(make, message, **changes)


@pytest.mark.parametrize(
    "make, name",
    [
        (build_candidates, "vocab_offset"),
        (build_select, "horizon"),
        (build_ddtree, "topk"),
        (verify_attn, "max_query_len"),
        (verify_attn_plan, "max_query_len"),
        (verify_attn_plan, "num_tokens"),
        (verify_attn_plan, "num_heads"),
        (verify_attn_plan, "page_size"),
    ],
)
@pytest.mark.parametrize("value", [2**40, -(2**40)])
def test_integers_that_the_field_cannot_hold(
    make: Callable[[], dict], name: str, value: int
) -> None:
    refused(make, rf"{name} must .* got {value}", **{name: value})


def test_the_vocabulary_ends_at_its_bound() -> None:
    most = 2**18 - V
    kernels.build_candidates(**build_candidates() | {"vocab_offset": most})
    message = rf"vocab_offset must be in \[0, {most}\], got {most + 1}"
    refused(build_candidates, message, vocab_offset=most + 1)


KEPT = ("query_start_loc", "slots", "prompt_lens", "positions", "num_sampled", "num_rejected")


@pytest.mark.parametrize("name", KEPT)
def test_what_a_step_keeps_is_given_all_or_none(name: str) -> None:
    call = tree_accept()
    refused(tree_accept, rf"all or none, got None for \['{name}'\]", **{name: None})
    alone = {other: call[other] if other == name else None for other in KEPT}
    missing = ", ".join(f"'{other}'" for other in KEPT if other != name)
    refused(tree_accept, re.escape(f"all or none, got None for [{missing}]"), **alone)
    kernels.tree_accept(**call | dict.fromkeys(KEPT))


def test_trees_without_their_rows() -> None:
    """Once read as "all are chains", without a look at the trees."""
    refused(tree_accept, "tree_rows must be given with parents", tree_rows=None)
    for make in (verify_attn, verify_attn_plan):
        refused(make, "tree_rows must be given with depths and ancestors", tree_rows=None)
        changes = {"tree_rows": None, "depths": None}
        refused(make, "tree_rows must be given with depths and ancestors", **changes)


def test_layers_and_slots_fit() -> None:
    with pytest.raises(ValueError, match="layers must be one or more"):
        kernels.KVCommit([], paged=True)
    for make in (kv_commit, plain_kv_commit):
        call = make()
        layers, slots = call.pop("layers"), call.pop("slots")
        commit = kernels.KVCommit(layers, paged=slots is not None)
        commit(slots, **call)
        with pytest.raises(ValueError, match="slots must be "):
            commit(int64(ROWS) if slots is None else None, **call)


def test_the_workspace_is_asked_for_by_shape() -> None:
    call = verify_attn()
    names = ("q", "kv_cache", "block_table")
    for name in names:
        tensors = {other: call[other] for other in names} | {name: call[name][0]}
        with pytest.raises(ValueError, match=f"^{name} must be"):
            kernels.verify_attn_workspace(**tensors, max_query_len=T)
    with pytest.raises(ValueError, match="kv_cache must be one of"):
        kernels.verify_attn_workspace(call["q"], call["kv_cache"].half(), call["block_table"], T)


# ---- values, on the CPU --------------------------------------------------------------------------


def changed(tensor: Tensor, at: int, value: int) -> Tensor:
    tensor = tensor.clone()
    tensor[at] = value
    return tensor


@pytest.mark.parametrize(
    "make, name, at, value, message",
    [
        (tree_place, "slots", 1, R, r"slots must be below 5, got 5"),
        (tree_place, "slots", 0, 2**40, r"slots must be below 5"),
        (tree_place, "slots", 0, -1, r"slots\[b\] must be at least 0, got -1"),
        (tree_place, "row_start", B, ROWS + 1, r"row_start\[-1\] must be at most 10, got 11"),
        (tree_place, "row_start", 0, -1, r"row_start\[0\] must be at least 0, got -1"),
        (tree_place, "query_start_loc", B, ROWS + 1, r"query_start_loc\[-1\] must be at most 10"),
        (tree_place, "query_start_loc", 0, -1, r"query_start_loc\[0\] must be at least 0"),
        (tree_accept, "slots", 1, R, r"slots must be below 5, got 5"),
        (tree_accept, "slots", 1, -1, r"slots\[b\] must be at least 0, got -1"),
        (tree_accept, "tree_rows", 0, R, r"tree_rows must be below 5, got 5"),
        (tree_accept, "row_start", B, ROWS + 1, r"row_start\[-1\] must be at most 10, got 11"),
        (tree_accept, "query_start_loc", B, ROWS + 1, r"query_start_loc\[-1\] must be at most 10"),
        (tree_accept, "query_start_loc", 0, -1, r"query_start_loc\[0\] must be at least 0"),
        (tree_accept, "query_start_loc", 1, 3, r"query tokens of a request must be at least 5"),
        (kv_commit, "slots", 4, 12, r"slots must be below 12, got 12"),
        (kv_commit, "query_start_loc", B, ROWS + 1, r"query_start_loc\[-1\] must be at most 10"),
        (kv_commit, "query_start_loc", 0, -1, r"query_start_loc\[0\] must be at least 0, got -1"),
        (plain_kv_commit, "query_start_loc", B, ROWS + 1, r"\[-1\] must be at most 10, got 11"),
        (verify_attn, "tree_rows", 0, R, r"tree_rows\[0\] must be below 5, got 5"),
        (verify_attn, "seq_lens", 1, 17, r"seq_lens\[1\] must be at most 16, got 17"),
    ],
)
def test_values_inside_the_tensors(
    make: Callable[[], dict], name: str, at: int, value: int, message: str
) -> None:
    refused(make, message, **{name: changed(make()[name], at, value)})


def test_skipped_slots_and_empty_requests_are_no_mistake() -> None:
    kernels.kv_commit(**kv_commit() | {"slots": torch.full((ROWS,), -1)})
    call = verify_attn() | {"query_start_loc": torch.tensor([0, 5, 5], dtype=torch.int32)}
    call["seq_lens"][1], call["tree_rows"][1] = 10**9, R
    kernels.verify_attn(**call)
