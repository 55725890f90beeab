"""Loads libkdtree_kernels_c, the native library of the operators, and mirrors its C structs.

Needs the standard library alone, so that other engines can use the operators without Torch.
The contract of every struct and function is csrc/include/kdtree.h, whose names and order of fields
these are.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import NoReturn

LIBRARY = "libkdtree_kernels_c.so"
ABI_VERSION = 3

CPU, CUDA = 0, 1  # kdtree_device
FLOAT32, BFLOAT16, FLOAT8_E4M3 = 0, 1, 2  # kdtree_dtype

MAX_NODES = 255
MAX_DEPTH = 32
MAX_TOPK = 64
LSE_WORDS = 3  # int64 words of a kdtree_lse


class CandidatesParams(Structure):
    """kdtree_candidates_params."""

    _fields_ = (
        ("device", c_int32),
        ("stream", c_void_p),
        ("logits_dtype", c_int32),
        ("logits", c_void_p),
        ("logits_row_stride", c_int64),
        ("rows", c_int32),
        ("vocab_size", c_int32),
        ("vocab_offset", c_int32),
        ("topk", c_int32),
        ("values", c_void_p),
        ("ids", c_void_p),
        ("lse", c_void_p),
    )


class SelectParams(Structure):
    """kdtree_select_params."""

    _fields_ = (
        ("device", c_int32),
        ("stream", c_void_p),
        ("batch", c_int32),
        ("horizon", c_int32),
        ("num_nodes", c_int32),
        ("topk", c_int32),
        ("num_shards", c_int32),
        ("spine", c_int32),
        ("values", c_void_p),
        ("ids", c_void_p),
        ("lse", c_void_p),
        ("chain_only", c_void_p),
        ("tree_rows", c_void_p),
        ("base", c_void_p),
        ("num_tree_rows", c_int32),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("depths", c_void_p),
        ("ancestors", c_void_p),
        ("positions", c_void_p),
        ("first_child", c_void_p),
        ("next_sibling", c_void_p),
        ("scores", c_void_p),
    )


class BuildParams(Structure):
    """kdtree_build_params."""

    _fields_ = (("candidates", CandidatesParams), ("select", SelectParams))


class VerifyAttnParams(Structure):
    """kdtree_verify_attn_params."""

    _fields_ = (
        ("device", c_int32),
        ("stream", c_void_p),
        ("batch", c_int32),
        ("num_tokens", c_int32),
        ("num_heads", c_int32),
        ("max_query_len", c_int32),
        ("q_dtype", c_int32),
        ("kv_dtype", c_int32),
        ("q", c_void_p),
        ("q_token_stride", c_int64),
        ("q_head_stride", c_int64),
        ("kv_cache", c_void_p),
        ("kv_page_stride", c_int64),
        ("kv_token_stride", c_int64),
        ("page_size", c_int32),
        ("num_pages", c_int32),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("seq_lens", c_void_p),
        ("query_start_loc", c_void_p),
        ("tree_rows", c_void_p),
        ("depths", c_void_p),
        ("ancestors", c_void_p),
        ("tree_width", c_int32),
        ("ancestor_width", c_int32),
        ("softmax_scale", c_float),
        ("kv_scale", c_float),
        ("out", c_void_p),
        ("out_token_stride", c_int64),
        ("out_head_stride", c_int64),
        ("lse", c_void_p),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
        ("planned", c_int32),
    )


class PlaceParams(Structure):
    """kdtree_place_params."""

    _fields_ = (
        ("device", c_int32),
        ("stream", c_void_p),
        ("batch", c_int32),
        ("max_batch", c_int32),
        ("query_start_loc", c_void_p),
        ("row_start", c_void_p),
        ("slots", c_void_p),
        ("prompt_lens", c_void_p),
        ("depths", c_void_p),
        ("tree_width", c_int32),
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("tree_rows", c_void_p),
        ("tokens", c_void_p),
        ("row_positions", c_void_p),
    )


class AcceptParams(Structure):
    """kdtree_accept_params."""

    _fields_ = (
        ("device", c_int32),
        ("stream", c_void_p),
        ("batch", c_int32),
        ("max_path", c_int32),
        ("tokens", c_void_p),
        ("targets", c_void_p),
        ("row_start", c_void_p),
        ("tree_rows", c_void_p),
        ("parents", c_void_p),
        ("tree_width", c_int32),
        ("emitted_width", c_int32),
        ("path", c_void_p),
        ("emitted", c_void_p),
        ("num_emitted", c_void_p),
        ("query_start_loc", c_void_p),
        ("slots", c_void_p),
        ("prompt_lens", c_void_p),
        ("positions", c_void_p),
        ("num_sampled", c_void_p),
        ("num_rejected", c_void_p),
        ("node_counts", c_void_p),
    )


class CommitParams(Structure):
    """kdtree_commit_params."""

    _fields_ = (
        ("device", c_int32),
        ("stream", c_void_p),
        ("batch", c_int32),
        ("max_path", c_int32),
        ("num_layers", c_int32),
        ("layers", POINTER(c_void_p)),
        ("row_bytes", c_int64),
        ("page_stride_bytes", c_int64),
        ("row_stride_bytes", c_int64),
        ("page_size", c_int32),
        ("slots", c_void_p),
        ("query_start_loc", c_void_p),
        ("path", c_void_p),
        ("num_emitted", c_void_p),
    )


OPERATORS: dict[str, type[Structure]] = {
    "kdtree_build_candidates": CandidatesParams,
    "kdtree_build_select": SelectParams,
    "kdtree_build_ddtree": BuildParams,
    "kdtree_verify_attn_plan": VerifyAttnParams,
    "kdtree_verify_attn": VerifyAttnParams,
    "kdtree_tree_place": PlaceParams,
    "kdtree_tree_accept": AcceptParams,
    "kdtree_kv_commit": CommitParams,
}


def library_path() -> Path:
    """Where the library is: beside this file, unless KDTREE_LIB names another one."""
    override = os.environ.get("KDTREE_LIB")
    if not override:
        return Path(__file__).with_name(LIBRARY)
    # The loader looks for a name without a slash in its own folders, and Path drops a "./".
    if os.sep in override or os.path.exists(override):
        return Path(override).absolute()
    return Path(override)


@functools.cache
def load() -> ctypes.CDLL:
    """The library, with the types of its functions set.

    Raises ImportError when it is missing, of another ABI or without a function.
    """
    path = library_path()
    remedy = "`pip install` of kdtree-runner builds it"
    if os.environ.get("KDTREE_LIB"):
        remedy = f"KDTREE_LIB names it: wanted a {LIBRARY}"
    try:
        lib = ctypes.CDLL(str(path))
        for name in ("kdtree_version", "kdtree_build_info", "kdtree_last_error"):
            getattr(lib, name).restype = c_char_p
    except (OSError, AttributeError) as error:  # AttributeError: a library without the function
        raise ImportError(f"cannot load {path} ({error}); {remedy}") from error
    version = lib.kdtree_version().decode()
    if not version.endswith(f"+abi{ABI_VERSION}"):
        raise ImportError(f"{path} must have ABI {ABI_VERSION}, got version {version}")
    try:
        for name, params in OPERATORS.items():
            getattr(lib, name).argtypes = (POINTER(params),)
        lib.kdtree_verify_attn_workspace.argtypes = (POINTER(VerifyAttnParams),)
        lib.kdtree_verify_attn_workspace.restype = c_size_t
        lib.kdtree_set_cpu_threads.argtypes = (c_int32,)
    except AttributeError as error:  # its text is the name of the function
        raise ImportError(f"{path} lacks a function of its version ({error}); {remedy}") from error
    return lib


def operator(name: str) -> Callable[[Structure], None]:
    """A function that calls the operator `name` with its struct and raises its error."""
    lib = load()
    function = getattr(lib, name)
    byref = ctypes.byref

    def call(params: Structure) -> None:
        status = function(byref(params))
        if status:
            raise_error(status)

    return call


def raise_error(status: int) -> NoReturn:
    """Raise this thread's last error as what its status says it is."""
    message = load().kdtree_last_error().decode()
    if status == 1:
        raise ValueError(message)
    if status == 2:
        raise NotImplementedError(message)
    raise RuntimeError(message)


def build_info() -> str:
    """Devices that the library was built for: "cpu", or "cpu;cuda:..." with the architectures."""
    return str(load().kdtree_build_info().decode())


def cuda_architectures(build_info: str) -> list[str]:
    """Architectures in a build info like "cpu;cuda:90a,100f"; none without CUDA."""
    parts = [part.removeprefix("cuda:") for part in build_info.split(";") if part[:5] == "cuda:"]
    return [name for part in parts for name in part.split(",") if name]


def fits(capability: str, architectures: Sequence[str]) -> bool:
    """Whether code built for `architectures` ("90a", "100f", "120") runs on a GPU ("9.0").

    a: exactly this one; f: its family, which is the same major number; otherwise PTX, good for
    every later one.
    """
    major, minor = (int(part) for part in capability.split("."))
    for architecture in architectures:
        match = re.fullmatch(r"(\d+)(\d)([af]?)", architecture)
        if match is None:
            continue
        built, kind = (int(match[1]), int(match[2])), match[3]
        here = (major, minor)
        if built == here or (kind != "a" and built < here and (not kind or built[0] == major)):
            return True
    return False


def set_cpu_threads(num_threads: int) -> None:
    """Threads that CPU operators may use, the caller's included; 0: one a processor."""
    status = load().kdtree_set_cpu_threads(num_threads)
    if status:
        raise_error(status)
