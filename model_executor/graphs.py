"""CUDA graphs for uniform batches of more than one width."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

MAX_CAPTURED_TOKENS = 2048  # of a batch of trees; larger ones gain little from a graph
REQUEST_STEP = 8  # requests between two sizes of large batches


def request_counts(max_num_reqs: int) -> list[int]:
    """Batch sizes that get a graph of their own; others run as the next larger one."""
    counts = {n for n in (1, 2, 4) if n <= max_num_reqs}
    return sorted(counts | {*range(REQUEST_STEP, max_num_reqs + 1, REQUEST_STEP), max_num_reqs})


def set_widths(manager: CudaGraphManager, widths: Iterable[int]) -> None:
    """Give a manager that has captured nothing yet full graphs for each width.

    widths: tokens a request. vLLM's own list maps a token count to the next captured one alone,
    which may be of another width, and rounds every size for every width. Here a batch finds the
    smallest graph of its width. Replaces what _init_candidates of vLLM 0.32.0
    v1/worker/gpu/cudagraph_utils.py made for CUDAGraphMode.FULL.
    """
    mode = manager.cudagraph_mode
    if not mode or mode.decode_mode() != CUDAGraphMode.FULL or not mode.separate_routine():
        return
    room = manager.compilation_config.max_cudagraph_capture_size or 0
    full = [
        BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.FULL,
            num_tokens=count * width,
            num_reqs=count,
            uniform_token_count=width,
        )
        for width in sorted(set(widths))
        for count in request_counts(min(manager.max_num_reqs, room // width))
    ]
    full.sort(key=lambda desc: desc.num_tokens)
    if not full:
        return
    manager._capture_descs[CUDAGraphMode.FULL] = full[::-1]  # the largest first: it sizes buffers
    others = {
        key: [desc for desc in descs if desc.cg_mode != CUDAGraphMode.FULL]
        for key, descs in manager._candidates.items()
    }
    manager._candidates.clear()
    most = max([full[-1].num_tokens, *(tokens for tokens, _ in others)])
    for tokens in range(most + 1):
        fitting = [desc for desc in full if desc.num_tokens >= tokens]
        manager._candidates[tokens, 0] = fitting + others.get((tokens, 0), [])
