"""Times verify_attn in CUDA graphs, in microseconds, beside other kernels on the same shapes.

python3 scripts/bench_verify_attn.py [--dtype bf16|fp8] [--all] [--json FILE]

A time is the median of 7 replays of a graph of 5 calls. T: query tokens a request (a drawn tree of
depth 8), H: heads on the rank. Peers are vLLM 0.32.0's kernels on one H200, bf16 cache, page 64,
causal (none of them takes a tree), measured the same way; they are read from the table below, not
measured by this script.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch

from kdtree_runner import ops

# B, T, H, prefix: FlashMLA, FA3-MLA, TRITON_MLA.
PEERS = {
    (1, 1, 8, 2048): (19.0, 13.7, 54.4),
    (1, 1, 8, 32768): (50.3, 26.3, 70.7),
    (1, 1, 16, 32768): (51.4, 27.2, 75.5),
    (1, 1, 64, 2048): (23.0, 16.0, 55.7),
    (1, 1, 64, 32768): (60.7, 35.1, 106.2),
    (1, 9, 8, 2048): (22.7, 18.7, 55.9),
    (1, 9, 8, 32768): (47.4, 36.5, 252.6),
    (1, 9, 16, 2048): (23.5, 19.0, 55.7),
    (1, 9, 16, 32768): (54.6, 45.7, 260.9),
    (1, 17, 8, 2048): (24.0, 19.2, 56.0),
    (1, 17, 8, 32768): (55.1, 45.2, 395.2),
    (1, 17, 16, 2048): (22.8, 21.2, 55.6),
    (1, 17, 16, 32768): (63.0, 60.5, 407.3),
    (1, 17, 64, 32768): (143.3, 139.2, 1303.1),
    (1, 65, 8, 2048): (37.3, 24.0, 80.3),
    (1, 65, 64, 32768): (448.4, 438.5, 4752.2),
    (8, 1, 8, 2048): (23.2, 16.2, 56.8),
    (8, 1, 8, 32768): (92.9, 82.9, 211.2),
    (8, 9, 8, 2048): (29.2, 25.5, 128.1),
    (8, 9, 8, 32768): (133.9, 128.2, 1367.1),
    (8, 17, 16, 2048): (42.8, 39.7, 228.3),
    (8, 17, 16, 32768): (288.8, 295.3, 2533.5),
    (8, 33, 16, 32768): (513.8, 865.1, 5353.8),
    (8, 65, 64, 32768): (3912.7, 3713.9, 36605.8),
    (32, 1, 8, 2048): (44.1, 33.9, 80.2),
    (32, 1, 8, 32768): (293.2, 279.4, 741.0),
    (32, 9, 8, 2048): (50.9, 50.1, 391.1),
    (32, 9, 16, 2048): (79.3, 90.5, 410.6),
    (32, 9, 16, 32768): (670.3, 878.3, 5350.6),
    (32, 17, 16, 2048): (109.4, 133.3, 709.7),
}
FEW = [
    *(
        (1, 1, 8, 2048),
        (1, 1, 8, 32768),
        (1, 9, 8, 2048),
        (1, 9, 8, 32768),
        (1, 17, 16, 2048),
    ),
    *((1, 17, 16, 32768), (8, 1, 8, 32768), (8, 9, 8, 32768), (8, 17, 16, 32768)),
    *((8, 33, 16, 32768), (32, 9, 16, 2048), (8, 65, 64, 32768)),
]
MAX_DEPTH = 8
DRAM, TENSOR = (
    4.3e6,
    790e6,
)  # bytes and FLOP a microsecond, measured on this kind of card


def draw_trees(batch: int, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Trees drawn at random: depths [B, T] and ancestors [B, T, A], int32."""
    rng = random.Random(1)
    depths = torch.zeros(batch, num_nodes, dtype=torch.int32)
    ancestors = torch.full((batch, num_nodes, MAX_DEPTH + 1), -1, dtype=torch.int32)
    for b in range(batch):
        paths = [[0]]
        while len(paths) < num_nodes:
            parent = rng.choice(paths) if rng.random() < 0.5 else paths[-1]
            if len(parent) <= MAX_DEPTH:
                paths.append([*parent, len(paths)])
        for node, path in enumerate(paths):
            depths[b, node] = len(path) - 1
            ancestors[b, node, : len(path)] = torch.tensor(path)
    return depths, ancestors


def make_call(batch: int, num_nodes: int, num_heads: int, prefix: int, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    """One verify_attn call on random data of these sizes."""
    device, length = "cuda", prefix + num_nodes
    num_pages = -(-length // 64)
    cache = torch.randn(batch * num_pages, 64, 576, device=device, dtype=torch.bfloat16).to(dtype)
    table = torch.randperm(batch * num_pages, device=device, dtype=torch.int32).view(batch, -1)
    q = torch.randn(batch * num_nodes, num_heads, 576, device=device, dtype=torch.bfloat16)
    depths, ancestors = (x.to(device) for x in draw_trees(batch, num_nodes))
    size = ops.verify_attn_workspace(q, cache, table, num_nodes)
    args = (
        q,
        cache,
        table,
        torch.full((batch,), length, dtype=torch.int32, device=device),
        torch.arange(batch + 1, dtype=torch.int32, device=device) * num_nodes,
        num_nodes,
        torch.arange(batch, dtype=torch.int32, device=device),
        depths,
        ancestors,
        576**-0.5,
        1.0,
        torch.empty(batch * num_nodes, num_heads, 512, device=device, dtype=torch.bfloat16),
        None,
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    return lambda: ops.verify_attn(*args)


def microseconds(call, calls: int = 5, replays: int = 7) -> float:  # type: ignore[no-untyped-def]
    """Median time of a call in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[replays // 2]


def floor(batch: int, num_nodes: int, num_heads: int, prefix: int, kv_bytes: int) -> float:
    """The least time, in microseconds: bytes at 4.3 TB/s or FLOPs at 790 TFLOP/s."""
    tokens, rows = prefix + num_nodes, batch * num_nodes * num_heads
    moved = batch * tokens * 576 * kv_bytes + rows * (576 + 512) * 2
    return max(moved / DRAM, 2 * rows * tokens * (576 + 512) / TENSOR)


def main() -> None:
    """Time the shapes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--all", action="store_true", help="all shapes that have peers' times")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float8_e4m3fn
    print(f"{torch.cuda.get_device_name()}, {options.dtype} cache, page 64, us")
    print("B T H prefix | verify_attn | FlashMLA FA3 TRITON_MLA | best/ours triton/ours | floor")
    rows = []
    for shape in PEERS if options.all else FEW:
        time = microseconds(make_call(*shape, dtype))
        torch.cuda.empty_cache()
        peers = PEERS[shape]
        best, triton = min(peers[:2]) / time, peers[2] / time
        low = floor(*shape, kv_bytes=dtype.itemsize)
        print(
            f"{shape!s:20} | {time:8.1f} | {peers[0]:7.1f} {peers[1]:7.1f} {peers[2]:8.1f} | "
            f"{best:5.2f} {triton:6.1f} | {low:.1f}",
            flush=True,
        )
        rows.append({"shape": shape, "us": time, "floor": low, "peers": peers})
    if options.json:
        options.json.write_text(json.dumps({"dtype": options.dtype, "rows": rows}))


if __name__ == "__main__":
    main()
