"""Times calls on the current GPU: in CUDA graphs, or from the host where no graph holds them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

CALLS = 5  # of a graph
REPLAYS = (7, 31)  # fewest and most; in between, as many as fit in FILL
FILL = 20e3  # microseconds
WARM_UP = 0.3  # seconds of work that bring an idle GPU to its clocks


@dataclass(frozen=True)
class Timing:
    """Microseconds a call, one entry a replay (or a call from the host)."""

    samples: tuple[float, ...]
    in_graph: bool = True

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Range of the middle half, as a share of the median."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.median


def num_replays(first: float) -> int:
    """Replays of a graph whose first took `first` microseconds."""
    return min(max(int(FILL / max(first, 1.0)), REPLAYS[0]), REPLAYS[1])


def warm_up() -> None:
    """Bring the GPU to the clocks that it has under load."""
    import torch

    a = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    end = time.perf_counter() + WARM_UP
    while time.perf_counter() < end:
        for _ in range(10):
            a @ a
        torch.cuda.synchronize()


def in_graph(call: Callable[[], object]) -> Timing:
    """Time a call in a CUDA graph of CALLS of them."""
    import torch

    call()  # compiles, plans and allocates what is made once
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    replays = num_replays(replay())
    samples = tuple(replay() / CALLS for _ in range(replays))
    graph.reset()
    return Timing(samples)


def on_host(call: Callable[[], object]) -> Timing:
    """Time a call that looks at its results, by the host's clock."""
    import torch

    def once() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6

    once()
    return Timing(tuple(once() for _ in range(num_replays(once()))), in_graph=False)
