"""Which CUDA graph a batch runs as, when trees have more than one size. Captures nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from kdtree_runner.model_executor.graphs import request_counts, set_widths

WIDTHS = (17, 9, 8, 1)
PIECEWISE = [
    BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, num_tokens=n, num_reqs=None)
    for n in (1, 2, 4, 8, 16, 64)
]


def manager(mode: CUDAGraphMode, max_num_reqs: int = 32, room: int = 600) -> Any:
    """As _init_candidates of vLLM leaves it, but for the full graphs, which are replaced."""
    made = CudaGraphManager.__new__(CudaGraphManager)
    made.cudagraph_mode, made.max_num_reqs = mode, max_num_reqs
    made.compilation_config = SimpleNamespace(max_cudagraph_capture_size=room)
    made._lora_dispatch_map, made._max_lora_case = {}, 0
    made._graphs_captured = True
    piecewise = PIECEWISE if mode == CUDAGraphMode.FULL_AND_PIECEWISE else []
    made._candidates = {
        (tokens, 0): [next(d for d in piecewise if d.num_tokens >= tokens)]
        for tokens in range(65 if piecewise else 0)
    }
    made._capture_descs = {CUDAGraphMode.PIECEWISE: piecewise} if piecewise else {}
    set_widths(made, WIDTHS)
    return made


def test_request_counts() -> None:
    assert request_counts(1) == [1]
    assert request_counts(3) == [1, 2, 3]
    assert request_counts(8) == [1, 2, 4, 8]
    assert request_counts(30) == [1, 2, 4, 8, 16, 24, 30]


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_every_uniform_batch_has_the_smallest_graph_of_its_width(mode: CUDAGraphMode) -> None:
    graphs = manager(mode)
    for width in WIDTHS:
        for num_reqs in range(1, 33):
            found = graphs.dispatch(num_reqs, num_reqs * width, width, 0)
            assert found.cg_mode == CUDAGraphMode.FULL
            assert found.uniform_token_count == width
            assert found.num_reqs == min(n for n in (1, 2, 4, 8, 16, 24, 32) if n >= num_reqs)
            assert found.num_tokens == found.num_reqs * width
    sizes = [desc.num_tokens for desc in graphs._capture_descs[CUDAGraphMode.FULL]]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 4 * 7


def test_other_batches_stay_piecewise_or_eager() -> None:
    graphs = manager(CUDAGraphMode.FULL_AND_PIECEWISE)
    assert graphs.dispatch(3, 30, None, 0).cg_mode == CUDAGraphMode.PIECEWISE
    assert graphs.dispatch(3, 90, None, 0).cg_mode == CUDAGraphMode.NONE
    graphs = manager(CUDAGraphMode.FULL_DECODE_ONLY)
    assert graphs.dispatch(3, 30, None, 0).cg_mode == CUDAGraphMode.NONE


def test_what_is_too_large_has_no_graph() -> None:
    graphs = manager(CUDAGraphMode.FULL_DECODE_ONLY, room=100)
    assert graphs.dispatch(5, 85, 17, 0).num_reqs == 5
    assert graphs.dispatch(6, 102, 17, 0).cg_mode == CUDAGraphMode.NONE
    assert graphs.dispatch(32, 32, 1, 0).cg_mode == CUDAGraphMode.FULL


def test_without_full_graphs_nothing_changes() -> None:
    for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
        assert CUDAGraphMode.FULL not in manager(mode)._capture_descs
