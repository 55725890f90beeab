"""The decode path never waits for a device value: nothing of ours reads one on the host."""

from __future__ import annotations

import linecache
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Baseline, EnginePool, assert_equal, generate, greedy, runner, sampled
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kdtree_runner.model_executor
import kdtree_runner.spec_decode

OURS = tuple(
    str(path)
    for m in (kdtree_runner.model_executor, kdtree_runner.spec_decode)
    for p in m.__path__
    for path in (Path(p), Path(p).resolve())  # a link, or what it leads to
)
# Operators whose result size or value the host has to know.
WAITING_OPS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")
# Operators that launch nothing.
FREE_OPS = (
    *("slice.Tensor", "select.int", "view.default", "alias.default", "new_empty.default"),
    *(
        "detach.default",
        "to.dtype_layout",
        "resolve_conj.default",
        "resolve_neg.default",
    ),  # numpy()
)
# Tensor methods that read values without an operator; on a GPU each of them waits.
WAITING_METHODS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
)
# vLLM keeps them on the host on a GPU, too.
HOST_TENSORS = ("seq_lens_cpu_upper_bound", "query_start_loc_cpu", "is_prefilling")


def our_line() -> str | None:
    """The line of ours that called torch, "file:number text"; None where vLLM or torch did."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS):
            text = linecache.getline(name, frame.f_lineno).strip()
            return f"{Path(name).name}:{frame.f_lineno} {text}"
        if "/vllm/" in name:
            return None
        frame = frame.f_back
    return None


class OpSpy(TorchDispatchMode):
    """Sees every operator of ATen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.names: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by file
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = our_line()
        if line is not None:
            self.calls[line.split(":")[0]] += 1
            name = func.__name__
            self.names[line.split(":")[0]][name] += 1
            if name.startswith(WAITING_OPS) or waits_by_arguments(name, args, kwargs or {}):
                self.waits[f"{name} in {line}"] += 1
        return func(*args, **(kwargs or {}))


def waits_by_arguments(name: str, args: Any, kwargs: Any) -> bool:
    """Boolean masks as indices, and repeats without a known total."""
    if name.startswith("index"):
        found = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else []
        return any(i is not None and i.dtype == torch.bool for i in found)
    return name == "repeat_interleave.Tensor" and kwargs.get("output_size") is None


class MethodSpy(TorchFunctionMode):
    """Sees every method of a tensor, also those that are no operator."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in WAITING_METHODS:
            line = our_line()
            if line is not None and not any(name in line for name in HOST_TENSORS):
                self.waits[f"{func.__name__} in {line}"] += 1
        return func(*args, **(kwargs or {}))


def spied(llm: Any, requests: list[Any]) -> tuple[list[Any], OpSpy, MethodSpy]:
    with MethodSpy() as methods, OpSpy() as ops:
        outputs = generate(llm, requests)
    return outputs, ops, methods


def test_no_operator_of_ours_waits(
    pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]
) -> None:
    requests = [
        greedy(prompts[0], 16),
        sampled(prompts[1], 1, 16, top_k=20),
        greedy(prompts[2], 16, logprobs=3),
        greedy(prompts[3], 16, frequency_penalty=1.0),
    ]
    want = baseline(requests)
    outputs, ops, methods = spied(pool.get("tree"), requests)
    assert_equal(outputs, want)
    assert ops.waits + methods.waits == Counter()
    for name in ("sampler.py", "speculator.py", "mla_backend.py"):
        assert ops.calls[name] > 20, ops.calls


def test_between_the_graphs_only_our_operators_run(
    pool: EnginePool, prompts: list[tuple[int, ...]]
) -> None:
    """A greedy step launches tree_place, tree_accept and two kv_commit.

    Of torch's it takes a gather and an argmax, in the place of vLLM's sampler. fill_ and new_ones
    are for new requests, and for steps without drafts: here the two prompts' first.
    """
    _, ops, _ = spied(pool.get("tree"), [greedy(prompts[0], 24), greedy(prompts[1], 24)])
    runner_ops, sampler_ops = ops.names["model_runner.py"], ops.names["sampler.py"]
    picks = {"index.Tensor", "argmax.default"}
    assert set(runner_ops) <= {*FREE_OPS, *picks, "fill_.Scalar"}, runner_ops
    assert set(sampler_ops) <= {*FREE_OPS, "new_ones.default"}, sampler_ops
    assert runner_ops["fill_.Scalar"] <= 4
    assert sampler_ops["new_ones.default"] <= 2
    assert runner_ops["index.Tensor"] == runner_ops["argmax.default"] <= 24


def test_method_spy_sees(pool: EnginePool, prompts: list[tuple[int, ...]]) -> None:
    """Negative control: the tree that `kdtree demo` draws is read on the host."""
    llm = pool.get("tree")
    runner(llm).tree_snapshot()
    try:
        _, _, methods = spied(llm, [greedy(prompts[0], 8)])
    finally:
        runner(llm)._tracing = False
    assert any("__int__ in model_runner.py" in wait for wait in methods.waits)
    assert any("tolist in model_runner.py" in wait for wait in methods.waits)


def test_op_spy_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: operators whose result has a size that depends on values."""
    monkeypatch.setattr(sys.modules[__name__], "our_line", lambda: "here:1")
    x = torch.tensor([3, 0, 2])
    with OpSpy() as spy:
        x[x > 0]
        x[x > 0] = 1
        x.nonzero()
        x.repeat_interleave(x)
        torch.masked_select(x, x > 0)
        torch.where(x > 0, x, 0)[x]  # these do not wait
    assert sum(spy.waits.values()) == 5, spy.waits
