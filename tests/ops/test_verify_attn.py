"""verify_attn against torch, and bit for bit against itself: verify(node) == decode(its path)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kdtree_runner import native, ops

KEY_DIM, VALUE_DIM = 576, 512
SCALE = 0.07
HORIZON = 7
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e4m3fn),
]
CHAIN = -1


def random_tree(num_tokens: int) -> list[list[int]]:
    """The path to each node, the root first, at most HORIZON nodes after it."""
    paths = [[0]]
    for node in range(1, num_tokens):
        open_nodes = [p for p in paths if len(p) <= HORIZON]
        paths.append([*open_nodes[int(torch.randint(len(open_nodes), ()))], node])
    return paths


def chain(num_tokens: int) -> list[list[int]]:
    return [list(range(node + 1)) for node in range(num_tokens)]


@dataclass
class Request:
    """One request: its sequence with the query tokens at the end, and what they see."""

    rows: Tensor  # [base + T, 576], cache rows
    q: Tensor  # [T, H, 576]
    paths: list[list[int]]  # of each query token
    is_tree: bool

    @property
    def base(self) -> int:
        return len(self.rows) - len(self.q)

    def seen(self, node: int) -> Tensor:
        """Cache rows that a query token sees, in order. [base + depth + 1, 576]"""
        return torch.cat([self.rows[: self.base], self.rows[self.base :][self.paths[node]]])


def request(
    base: int,
    num_tokens: int,
    num_heads: int = 4,
    dtypes: tuple[torch.dtype, torch.dtype] = DTYPES[0],
    is_tree: bool = True,
) -> Request:
    return Request(
        rows=torch.randn(base + num_tokens, KEY_DIM).to(dtypes[1]),
        q=torch.randn(num_tokens, num_heads, KEY_DIM).to(dtypes[0]),
        paths=random_tree(num_tokens) if is_tree else chain(num_tokens),
        is_tree=is_tree,
    )


def decode_of(req: Request, node: int, num_tokens: int = 1) -> Request:
    """The chain of a node's path, of which the last `num_tokens` are query tokens."""
    path = req.paths[node][-num_tokens:]
    return Request(req.seen(node), req.q[path], chain(len(path)), is_tree=False)


def attend(
    requests: list[Request], page_size: int = 16, kv_scale: float = 1.0, spare_rows: int = 0
) -> tuple[Tensor, Tensor]:
    """One verify_attn call. Everything in the cache that belongs to no sequence is NaN.

    Returns out [num_tokens + spare_rows, H, 512] and lse [num_tokens + spare_rows, H], first filled
    with -7.
    """
    pages_of = [-(-len(r.rows) // page_size) for r in requests]
    num_pages = sum(pages_of) + 3
    dtype = requests[0].rows.dtype
    cache = torch.full((num_pages, page_size, KEY_DIM), torch.nan).to(dtype)
    order = torch.randperm(num_pages).tolist()
    table = torch.full((len(requests), max(pages_of) + 2), 10**9, dtype=torch.int32)
    width = max(len(r.q) for r in requests)
    depths = torch.full((len(requests), width), 99, dtype=torch.int32)
    ancestors = torch.full((len(requests), width, HORIZON + 1), -1, dtype=torch.int32)
    for b, req in enumerate(requests):
        for page in range(pages_of[b]):
            table[b, page] = order.pop()
            piece = req.rows[page * page_size : (page + 1) * page_size]
            cache.view(torch.uint8)[table[b, page], : len(piece)] = piece.view(torch.uint8)
        for node, path in enumerate(req.paths if req.is_tree else []):
            depths[b, node] = len(path) - 1
            ancestors[b, node, : len(path)] = torch.tensor(path)
    lens = [len(r.q) for r in requests]
    nan_rows = torch.full((spare_rows, *requests[0].q.shape[1:]), torch.nan)
    q = torch.cat([r.q for r in requests] + [nan_rows.to(requests[0].q.dtype)])
    out = torch.full((*q.shape[:2], VALUE_DIM), -7.0, dtype=q.dtype)
    lse = torch.full(q.shape[:2], -7.0)
    ops.verify_attn(
        q,
        cache,
        table,
        torch.tensor([len(r.rows) for r in requests], dtype=torch.int32),
        torch.tensor([0, *lens]).cumsum(0).int(),
        max(lens),
        torch.tensor([b if r.is_tree else CHAIN for b, r in enumerate(requests)]).int(),
        depths,
        ancestors,
        SCALE,
        kv_scale,
        out,
        lse,
    )
    return out, lse


def reference(req: Request, dtype: torch.dtype, kv_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Attention in `dtype`. Returns out [T, H, 512] and lse [T, H]."""
    outs, lses = [], []
    for node in range(len(req.q)):
        seen = req.seen(node).to(dtype) * kv_scale
        scores = req.q[node].to(dtype) @ seen.T * SCALE
        outs.append(torch.softmax(scores, -1) @ seen[:, :VALUE_DIM])
        lses.append(torch.logsumexp(scores, -1))
    return torch.stack(outs), torch.stack(lses)


def max_error(got: Tensor, want: Tensor) -> float:
    return (got.double() - want).abs().max().item()


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("is_tree", [True, False])
@pytest.mark.parametrize(
    "base, num_tokens, num_heads",
    [
        (0, 1, 1),
        (0, 17, 4),
        (5, 1, 4),
        (31, 17, 3),
        (32, 2, 7),
        (33, 9, 16),
        (300, 17, 4),
        (130, 5, 64),
        (40, 32, 33),
    ],
)
def test_against_torch(
    dtypes: tuple[torch.dtype, torch.dtype],
    is_tree: bool,
    base: int,
    num_tokens: int,
    num_heads: int,
) -> None:
    kv_scale = 0.5 if dtypes[1] == torch.float8_e4m3fn else 1.0
    req = request(base, num_tokens, num_heads, dtypes, is_tree)
    out, lse = attend([req], kv_scale=kv_scale)
    want, want_lse = reference(req, torch.float64, kv_scale)
    torch_out, _ = reference(req, dtypes[0], kv_scale)
    assert max_error(out, want) <= 2 * max_error(torch_out, want) + 1e-6
    assert max_error(lse, want_lse) < 5e-6


def test_all_values_of_float8() -> None:
    """A cache row holds every finite e4m3 value; a softmax over that one key returns it."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn)
    finite = values[~values.float().isnan()]
    rows = torch.zeros(1, KEY_DIM).to(torch.float8_e4m3fn)
    rows.view(torch.uint8)[0, : len(finite)] = finite.view(torch.uint8)
    out, _ = attend([Request(rows, torch.zeros(1, 1, KEY_DIM), chain(1), is_tree=False)])
    assert torch.equal(out[0, 0, : len(finite)], finite.float())


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("base", [0, 1, 15, 30, 31, 32, 33, 63, 300])
def test_a_node_is_bitwise_the_decode_of_its_path(
    dtypes: tuple[torch.dtype, torch.dtype], base: int
) -> None:
    req = request(base, 17, dtypes=dtypes)
    out, lse = attend([req])
    for node in range(17):
        for num_tokens in (1, 2, 5):
            decoded, decoded_lse = attend([decode_of(req, node, num_tokens)], page_size=7)
            assert torch.equal(decoded[-1], out[node]), (node, num_tokens)
            assert torch.equal(decoded_lse[-1], lse[node]), (node, num_tokens)


@pytest.mark.parametrize("dtypes", DTYPES)
def test_neighbours_do_not_matter(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    requests = [
        request(300, 17, dtypes=dtypes),
        request(5, 1, dtypes=dtypes),
        request(37, 9, dtypes=dtypes, is_tree=False),
        request(0, 30, dtypes=dtypes),
        request(64, 1, dtypes=dtypes, is_tree=False),
        request(31, 32, dtypes=dtypes),
    ]
    out, lse = attend(requests)
    start = 0
    for req in requests:
        alone, alone_lse = attend([req])
        end = start + len(req.q)
        assert torch.equal(alone, out[start:end]) and torch.equal(alone_lse, lse[start:end])
        start = end


def test_heads_do_not_matter() -> None:
    req = request(100, 9, num_heads=37)
    out, _ = attend([req])
    for heads in (slice(0, 1), slice(5, 8), slice(0, 16), slice(36, 37)):
        some, _ = attend([Request(req.rows, req.q[:, heads], req.paths, is_tree=True)])
        assert torch.equal(some, out[:, heads])


@pytest.mark.parametrize("page_size", [1, 16, 33, 64])
def test_page_size_does_not_matter(page_size: int) -> None:
    req = request(90, 17)
    assert torch.equal(attend([req], page_size)[0], attend([req], 32)[0])


def test_threads_do_not_matter() -> None:
    requests = [request(base, 17) for base in (200, 3, 95)]
    outs = []
    for num_threads in (1, 2, 3, 8):
        native.set_cpu_threads(num_threads)
        outs.append(attend(requests)[0])
    native.set_cpu_threads(0)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_prefix_of_the_nodes_gives_the_same_rows() -> None:
    """The scheduler may cut drafts: the rows that stay do not change."""
    req = request(50, 17)
    out, _ = attend([req])
    for num_tokens in (1, 6, 16):
        rows = req.rows[: req.base + num_tokens]
        cut = Request(rows, req.q[:num_tokens], req.paths[:num_tokens], is_tree=True)
        assert torch.equal(attend([cut])[0], out[:num_tokens])


def test_long_chain() -> None:
    req = request(3, 300, num_heads=2, is_tree=False)
    out, _ = attend([req])
    want, _ = reference(req, torch.float64)
    assert max_error(out, want) < 1e-5


def test_large_tree() -> None:
    req = request(10, 256, num_heads=2)
    want, _ = reference(req, torch.float64)
    assert max_error(attend([req])[0], want) < 1e-5


def test_rows_past_the_batch_are_left_alone() -> None:
    out, lse = attend([request(20, 3), request(7, 2)], spare_rows=4)
    assert (out[5:] == -7).all() and (lse[5:] == -7).all()
    assert not (out[:5] == -7).any()


def test_request_without_query_tokens() -> None:
    idle = Request(torch.empty(0, KEY_DIM), torch.empty(0, 4, KEY_DIM), [], is_tree=False)
    req = request(20, 5)
    assert torch.equal(attend([idle, req, idle])[0], attend([req])[0])


def test_scores_far_apart() -> None:
    req = request(40, 9)
    req.q.mul_(200)
    out, lse = attend([req])
    want, want_lse = reference(req, torch.float64)
    assert max_error(out, want) < 1e-3
    assert max_error(lse / want_lse, torch.ones_like(want_lse)) < 1e-5


def test_strided_tensors() -> None:
    dtypes = DTYPES[0]
    req = request(20, 6, dtypes=dtypes, is_tree=False)
    want, _ = attend([req])
    cache = torch.full((3, 20, 600), torch.nan)[:, ::2, 8 : 8 + KEY_DIM]  # pages of 10
    cache.view(3, 10, KEY_DIM)[:] = 0
    for i, row in enumerate(req.rows):
        cache[2 - i // 10, i % 10] = row
    q = torch.full((6, 5, 700), torch.nan)[:, :4, 50 : 50 + KEY_DIM]
    q.copy_(req.q)
    whole = torch.full((8, 6, 600), -7.0)
    out = whole[1:7, 1:5, 44 : 44 + VALUE_DIM]
    table = torch.tensor([[9, 9, 9, 9], [2, 1, 0, 9]], dtype=torch.int32)[1:, :3]
    ops.verify_attn(
        q,
        cache,
        table,
        torch.tensor([26], dtype=torch.int32),
        torch.tensor([0, 6], dtype=torch.int32),
        6,
        None,
        None,
        None,
        SCALE,
        1.0,
        out,
    )
    assert torch.equal(out, want)
    out.fill_(-7)
    assert (whole == -7).all()


def arguments(**changes: object) -> dict:
    """A valid call of two requests, of which one is a tree."""
    tree_rows = torch.tensor([1, CHAIN], dtype=torch.int32)
    depths = torch.tensor([[9, 9, 9], [0, 1, 1]], dtype=torch.int32)
    ancestors = torch.tensor([[[9, 9]] * 3, [[0, -1], [0, 1], [0, 2]]], dtype=torch.int32)
    return {
        "q": torch.randn(5, 2, KEY_DIM),
        "kv_cache": torch.randn(4, 8, KEY_DIM),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seq_lens": torch.tensor([12, 9], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 3, 5], dtype=torch.int32),
        "max_query_len": 3,
        "tree_rows": tree_rows,
        "depths": depths,
        "ancestors": ancestors,
        "softmax_scale": SCALE,
        "kv_scale": 1.0,
        "out": torch.empty(5, 2, VALUE_DIM),
        "lse": torch.empty(5, 2),
        "workspace": None,
    } | changes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"seq_lens": [2, 9]}, r"seq_lens\[b\] must be at least 3, got 2"),
        ({"query_start_loc": [0, 3, 6]}, "query_start_loc must be at most num_tokens, got 6"),
        ({"query_start_loc": [0, 4, 5]}, r"tokens of a request must be in \[0, 3\], got 4"),
        ({"query_start_loc": [3, 0, 2]}, r"tokens of a request must be in \[0, 3\], got -3"),
        ({"block_table": [[0, 4], [2, 3]]}, r"block_table must be in \[0, 3\], got 4"),
        ({"depths": [[9] * 3, [0, 2, 1]]}, r"depths must be in \[0, 1\], got 2"),
        ({"ancestors": [[[9, 9]] * 3, [[0, -1], [0, 1], [5, 2]]]}, r"ancestors .* \[0, 2\], got 5"),
    ],
)
def test_errors_of_the_library(changes: dict, message: str) -> None:
    tensors = {name: torch.tensor(value).int() for name, value in changes.items()}
    with pytest.raises(ValueError, match=f"kdtree_verify_attn: .*{message}"):
        ops.verify_attn(**arguments(**tensors))


def test_errors_name_argument_wanted_and_got() -> None:
    ops.verify_attn(**arguments())
    for changes, message in [
        (
            {"q": torch.randn(5, 2, 575)},
            r"q must be .*\[5, 2, 576\].* got torch.float32 \[5, 2, 575\]",
        ),
        ({"kv_cache": torch.randn(4, 8, 512)}, r"kv_cache must be .*\[4, 8, 576\]"),
        ({"seq_lens": torch.tensor([12, 9])}, r"seq_lens must be torch.int32 \[2\].*torch.int64"),
        ({"depths": None}, "depths and ancestors must be given with tree_rows"),
        ({"out": torch.empty(5, 2, VALUE_DIM).bfloat16()}, "out must be of q's dtype"),
        ({"kv_cache": torch.randn(4, 8, 576).bfloat16()}, "kv_dtype must be q_dtype or 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.verify_attn(**arguments(**changes))


def test_empty_batch() -> None:
    ops.verify_attn(
        **arguments(
            q=torch.randn(0, 2, KEY_DIM),
            block_table=torch.empty(0, 2, dtype=torch.int32),
            seq_lens=torch.empty(0, dtype=torch.int32),
            query_start_loc=torch.zeros(1, dtype=torch.int32),
            tree_rows=torch.empty(0, dtype=torch.int32),
            out=torch.empty(0, 2, VALUE_DIM),
            lse=None,
        )
    )


def test_no_workspace_on_the_cpu() -> None:
    args = arguments()
    assert ops.verify_attn_workspace(args["q"], args["kv_cache"], args["block_table"], 3) == 0


def test_opcheck() -> None:
    op = torch.ops.kdtree.verify_attn.default
    torch.library.opcheck(op, tuple(arguments().values()))
    torch.library.opcheck(
        op, tuple(arguments(tree_rows=None, depths=None, ancestors=None, lse=None).values())
    )
