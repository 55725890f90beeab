"""What the functions of all operators share: checks of tensors, and the fields they become.

Part of kdtree_kernels.py; nothing here is an interface for others.
"""

from __future__ import annotations

import ctypes
import struct
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
FLOATS = (torch.float32, torch.bfloat16)


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


def device_and_stream(name: str, tensor: Tensor) -> tuple[int, int | None]:
    """The first two fields of every struct: kdtree_device, and the current stream of a GPU."""
    if tensor.is_cuda:
        return native.CUDA, torch.cuda.current_stream(tensor.device).cuda_stream
    if tensor.is_cpu:
        return native.CPU, None
    raise ValueError(f"{name} must be on the CPU or on a CUDA device, got {tensor.device}")


def pointers(*tensors: Tensor | None) -> list[int | None]:
    """Where the data of each tensor lies. None stays None."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def sizes(name: str, tensor: Tensor, *dims: str) -> torch.Size:
    """The sizes of a tensor that has one dimension for each of `dims`, their names."""
    shape = tensor.shape
    if len(shape) != len(dims):
        raise ValueError(f"{name} must be [{', '.join(dims)}], got {describe(tensor)}")
    return shape


def check(
    name: str, tensor: Tensor | None, device: torch.device, dtype: torch.dtype, *shape: int
) -> None:
    """A contiguous tensor of this dtype and shape, on this device. None passes."""
    if tensor is None or (
        tensor.shape == shape
        and tensor.dtype is dtype
        and tensor.is_contiguous()
        and (tensor.device == device or tensor.device.type == device.type)
    ):
        return
    check_device(name, tensor, device)
    wanted = f"{dtype} {list(shape)}, contiguous"
    raise ValueError(f"{name} must be {wanted}, got {describe(tensor)}")


def check_rows(
    name: str,
    tensor: Tensor,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    *shape: int,
) -> None:
    """A tensor of this shape and device whose rows, its last dimension, are contiguous."""
    if (
        tensor.shape == shape
        and tensor.stride(-1) == 1
        and tensor.dtype in dtypes
        and (tensor.device == device or tensor.device.type == device.type)
    ):
        return
    check_device(name, tensor, device)
    wanted = f"{' or '.join(map(str, dtypes))} {list(shape)} with contiguous rows"
    raise ValueError(f"{name} must be {wanted}, got {describe(tensor)}")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """All tensors of a call are on the CPU, or all on GPUs.

    On which GPU is not looked at: vLLM's host memory that GPUs read has the number of the one that
    was current when it was mapped.
    """
    if tensor.device.type != device.type:
        raise ValueError(f"{name} must be on {device}, as the others, got {tensor.device}")


def describe(tensor: Tensor) -> str:
    """What came, for an error's message."""
    return f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"


def int32(name: str, value: int) -> int:
    """A value for a field of 32 bits, which ctypes would cut without a word."""
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{name} must fit into 32 bits, got {value}")
    return value


def dtype_code(name: str, dtype: torch.dtype) -> int:
    """The kdtree_dtype of a dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"{name} must be one of {list(map(str, DTYPES))}, got {dtype}")
    return DTYPES[dtype]


# Where indices on the CPU lead: the structs carry no sizes, so that the library cannot look. Never
# for a GPU's values. Read by address, 1 us for ten values: item() and max() are operators of Torch,
# which a decode step must be free of.


def check_last(name: str, starts: Tensor, most: int) -> None:
    """The last of ascending starts, [B + 1] int32 on the CPU, is at most `most`."""
    end = ctypes.c_int32.from_address(starts.data_ptr() + 4 * (starts.numel() - 1)).value
    if end > most:
        raise ValueError(f"{name}[-1] must be at most {most}, got {end}")


def check_below(name: str, indices: Tensor, bound: int) -> None:
    """Indices, one or more contiguous int32 or int64 on the CPU, are below `bound`."""
    largest = max(values(indices))
    if largest >= bound:
        raise ValueError(f"{name} must be below {bound}, got {largest}")


def values(tensor: Tensor) -> tuple[int, ...]:
    """The values of a contiguous int32 or int64 tensor on the CPU."""
    count = tensor.numel()
    code, size = ("i", 4) if tensor.dtype is torch.int32 else ("q", 8)
    return struct.unpack(f"{count}{code}", ctypes.string_at(tensor.data_ptr(), count * size))
