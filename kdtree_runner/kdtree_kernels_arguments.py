"""What the functions of all operators share: checks of tensors, and the fields they become.

Part of kdtree_kernels.py; nothing here is an interface for others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

if __name__.startswith("kdtree_runner."):
    from kdtree_runner import native
else:  # outside the package, even where it is installed: the files beside this one
    import native  # type: ignore[import-not-found, no-redef]

DTYPES = {
    torch.float32: native.FLOAT32,
    torch.bfloat16: native.BFLOAT16,
    torch.float8_e4m3fn: native.FLOAT8_E4M3,
    torch.uint8: native.FLOAT8_E4M3,  # how vLLM keeps a float8 cache
}


def operator(name: str) -> Callable[[ctypes.Structure, torch.device], None]:
    """The operator `name` of the library, called with its struct and the device of its tensors."""
    call = native.operator(name)

    def run(params: ctypes.Structure, device: torch.device) -> None:
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            call(params)
            return
        with torch.cuda.device(device):
            call(params)

    return run


def device_and_stream(tensor: Tensor) -> tuple[int, int | None]:
    """The first two fields of every struct: kdtree_device, and the current stream of a GPU."""
    if tensor.is_cuda:
        return native.CUDA, torch.cuda.current_stream(tensor.device).cuda_stream
    return native.CPU, None


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """Where the data of each tensor lies. None stays None."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def check(name: str, tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> None:
    """A contiguous tensor of this dtype and shape. None passes."""
    if tensor is None or (
        tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    ):
        return
    wanted = f"{dtype} {list(shape)}, contiguous"
    raise ValueError(f"{name} must be {wanted}, got {describe(tensor)}")


def check_rows(name: str, tensor: Tensor, *shape: int) -> None:
    """A tensor of this shape whose rows, its last dimension, are contiguous."""
    if tensor.shape == shape and tensor.stride(-1) == 1 and tensor.dtype in DTYPES:
        return
    wanted = f"float32, bfloat16 or float8_e4m3 {list(shape)} with contiguous rows"
    raise ValueError(f"{name} must be {wanted}, got {describe(tensor)}")


def describe(tensor: Tensor) -> str:
    """What came, for an error's message."""
    return f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
