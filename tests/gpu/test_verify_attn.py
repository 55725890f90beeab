"""verify_attn on a GPU: against float64, and bit for bit against itself in other company."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kdtree_runner import native, ops

from .attention import (
    DEVICE,
    NAN8,
    Problem,
    Tree,
    assert_close,
    assert_same,
    bits,
    draw,
    draw_tree,
    rows_of,
    run,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DTYPES = (torch.bfloat16, torch.float8_e4m3fn)

# ---- against float64

SHAPES = [
    # bases, nodes, heads
    ([0, 1, 31, 32], 9, 8),
    ([500, 505, 511, 512, 515], 9, 8),
    ([2047, 65, 4096, 3001], 17, 16),
    ([1500], 33, 16),
    ([777, 2048], 9, 64),
    ([3000], 1, 8),
    ([100, 8200], 5, 4),
    ([700, 3], 6, 128),
    ([640, 129], 7, 24),
    ([333], 12, 1),
    ([12285, 12288], 9, 8),
    ([90], 256, 2),
    ([1000], 255, 8),
    ([70000], 3, 8),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bases", "num_nodes", "num_heads"), SHAPES, ids=str)
def test_error(bases: list[int], num_nodes: int, num_heads: int, dtype: torch.dtype) -> None:
    rng = random.Random(1)
    trees = [draw_tree(num_nodes, rng) for _ in bases]
    trees[-1] = trees[-1] if len(trees) == 1 else Tree(num_nodes)
    problem = draw(bases, trees, num_heads, dtype)
    print(f"error {assert_close(problem, run(problem)):.2e}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_batch_with_padding_and_odd_strides(dtype: torch.dtype) -> None:
    rng = random.Random(2)
    trees = [
        draw_tree(9, rng),
        Tree(1),
        Tree(40),
        draw_tree(1, rng),
        draw_tree(65, rng),
        Tree(300),
    ]
    problem = draw([300, 4097, 20, 127, 1000, 5], trees, 8, dtype)
    assert_close(problem, run(problem, 16, padded=3, odd_strides=True))


def test_wide_batch() -> None:
    """More requests than a warp has lanes."""
    rng = random.Random(3)
    trees = [draw_tree(rng.choice([1, 5, 9]), rng) for _ in range(77)]
    problem = draw([rng.randrange(0, 700) for _ in trees], trees, 8, torch.bfloat16)
    assert_close(problem, run(problem, 32, padded=5))


def test_workspace_in_parts() -> None:
    """A workspace for all rows at once would be over 512 MiB: several launches."""
    rng = random.Random(4)
    trees = [draw_tree(65, rng), Tree(64), draw_tree(33, rng)]
    problem = draw([700, 1300, 2000], trees, 64, torch.bfloat16)
    result = run(problem, max_pages=1024)
    assert_close(problem, result)
    assert_same(result, run(problem), "in one launch")


# ---- bit for bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_nodes", "num_heads"), [(9, 8), (17, 16)])
def test_company_and_pages(num_nodes: int, num_heads: int, dtype: torch.dtype) -> None:
    """Two runs, alone or in a batch, any page size, other places in the cache."""
    rng = random.Random(5)
    bases = [2048, 31, 4095, 1000, 510, 8191, 65, 12287]
    trees = [draw_tree(num_nodes, rng) for _ in bases]
    problem = draw(bases, trees, num_heads, dtype)
    together = run(problem)
    assert_same(together, run(problem), "two runs")
    for page_size in (16, 32, 48):
        assert_same(together, run(problem, page_size, seed=page_size), f"page size {page_size}")
    assert_same(together, run(problem, odd_strides=True), "odd strides")
    assert_same(together, run(problem, max_pages=4096), "longer block table")
    for b in range(len(bases)):
        mine = rows_of(together, slice(b * num_nodes, (b + 1) * num_nodes))
        assert_same(mine, run(problem.only(b), 16), f"request {b} alone")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_heads", [8, 16, 40])
@pytest.mark.parametrize("base", [2047, 1024, 509, 12280])
def test_prefixes_of_a_tree(base: int, num_heads: int, dtype: torch.dtype) -> None:
    rng = random.Random(6)
    tree = draw_tree(33, rng)
    problem = draw([base], [tree], num_heads, dtype)
    whole = run(problem)
    for num_nodes in (1, 2, 9, 17):
        assert tree.parents is not None
        part = replace(
            problem,
            q=[problem.q[0][:num_nodes]],
            rows=[problem.rows[0][: base + num_nodes]],
            trees=[Tree(num_nodes, tree.parents[:num_nodes])],
        )
        assert_same(rows_of(whole, slice(num_nodes)), run(part), f"{num_nodes} nodes")


def decode_of(problem: Problem, node: int) -> Problem:
    """The plain decode that ends in `node` of request 0: its path in sequence, one query token."""
    base, path = problem.bases[0], problem.trees[0].path(node)
    rows = problem.rows[0]
    sequence = [*range(base), *(base + n for n in path)]
    moved = bits(rows)[sequence].view(rows.dtype)
    return replace(
        problem,
        q=[problem.q[0][node : node + 1]],
        rows=[moved],
        bases=[base + len(path) - 1],
        trees=[Tree(1)],
    )


BASES = [
    *(
        0,
        1,
        31,
        32,
        63,
        64,
        65,
        95,
        127,
        128,
        129,
        160,
        255,
        256,
        257,
        500,
        504,
        505,
        511,
        512,
    ),
    *(
        513,
        1023,
        1024,
        1025,
        2016,
        2047,
        2048,
        2049,
        4090,
        8185,
        12270,
        12279,
        12288,
        18430,
    ),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_nodes", "num_heads", "bases"),
    [
        (17, 8, BASES),
        (33, 16, [1000, 1024, 2047]),
        (9, 64, [1000, 1022]),
        (5, 128, [130]),
    ],
    ids=["17x8", "33x16", "9x64", "5x128"],
)
def test_verify_is_decode(
    num_nodes: int, num_heads: int, bases: list[int], dtype: torch.dtype
) -> None:
    """A node's result is that of the plain decode of its path: alone, batched, and as a chain."""
    rng = random.Random(7)
    for base in bases:
        problem = draw([base], [draw_tree(num_nodes, rng)], num_heads, dtype, seed=base)
        verified = run(problem)
        decodes = [decode_of(problem, node) for node in range(num_nodes)]
        batched = Problem(
            [p.q[0] for p in decodes],
            [p.rows[0] for p in decodes],
            [p.bases[0] for p in decodes],
            [p.trees[0] for p in decodes],
            problem.kv_scale,
        )
        assert_same(verified, run(batched, 32), f"base {base}: decodes in a batch")
        last = num_nodes - 1
        assert_same(rows_of(verified, [last]), run(decodes[last], 16), f"base {base}: alone")
        path = problem.trees[0].path(last)
        rows = problem.rows[0]
        chain = replace(
            problem,
            q=[problem.q[0][path]],
            rows=[bits(rows)[[*range(base), *(base + n for n in path)]].view(dtype)],
            trees=[Tree(len(path))],
        )
        assert_same(rows_of(verified, path), run(chain), f"base {base}: the path as a chain")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_chain_is_its_decodes(dtype: torch.dtype) -> None:
    """Chains share what their row tiles share; a token of one is a plain decode all the same."""
    problem = draw([100], [Tree(400)], 4, dtype)
    whole = run(problem)
    for node in (0, 1, 27, 28, 29, 155, 156, 157, 399):
        assert_same(rows_of(whole, [node]), run(decode_of(problem, node)), f"token {node}")


def test_fp8_is_bf16_of_the_same_values() -> None:
    """All e4m3 values, exactly: a float8 cache gives what a bfloat16 one with its values gives."""
    rng = random.Random(8)
    problem = draw([1000], [draw_tree(9, rng)], 8, torch.float8_e4m3fn)
    finite = [b for b in range(256) if b & 0x7F != NAN8]
    bits(problem.rows[0])[:, : len(finite)] = torch.tensor(finite, device=DEVICE).byte()
    problem = replace(problem, kv_scale=1 / 64)
    same = replace(problem, rows=[problem.rows[0].bfloat16()])
    assert_same(run(problem), run(same), "float8 and bfloat16")


def test_graph_follows_lengths_on_the_device() -> None:
    rng = random.Random(9)
    tree = draw_tree(9, rng)
    problem = draw([1500], [tree], 8, torch.bfloat16)
    cache = problem.rows[0][:1472].view(-1, 64, 576)
    table = torch.arange(len(cache), dtype=torch.int32, device=DEVICE)[None]
    lens = torch.tensor([1472], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 9], dtype=torch.int32, device=DEVICE)
    q = problem.q[0]
    out = torch.empty(9, 8, 512, dtype=torch.bfloat16, device=DEVICE)
    size = ops.verify_attn_workspace(q, cache, table, 9)
    workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)

    def call() -> None:
        ops.verify_attn(
            *(
                q,
                cache,
                table,
                lens,
                starts,
                9,
                None,
                None,
                None,
                0.05,
                1.0,
                out,
                None,
                workspace,
            )
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for length, count in ((900, 9), (64, 3), (1472, 9)):
        lens.fill_(length)
        starts[1] = count
        out.zero_()
        graph.replay()
        replayed = out.clone()
        out.zero_()
        call()
        assert torch.equal(replayed, out) and out[:count].abs().sum(-1).gt(0).all()


def test_refusals() -> None:
    q = torch.zeros(1, 8, 576, device=DEVICE)
    cache = torch.zeros(2, 64, 576, device=DEVICE)
    ints = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE)
    out = torch.zeros(1, 8, 512, device=DEVICE)

    def call(q: Tensor, cache: Tensor, out: Tensor, workspace: Tensor | None) -> None:
        ops.verify_attn(
            *(q, cache, ints, ints[0, :1].contiguous(), ints[0], 1, None, None, None),
            *(1.0, 1.0, out, None, workspace),
        )

    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match="q_dtype"):
        call(q, cache, out, None)
    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match="workspace"):
        call(q.bfloat16(), cache.bfloat16(), out.bfloat16(), None)
    assert "cuda" in native.load().kdtree_build_info().decode()
