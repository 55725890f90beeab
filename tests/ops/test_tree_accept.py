"""tree_accept against a walk in plain Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdtree_runner import ops


def ints(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def accept(
    tokens: Tensor,
    targets: Tensor,
    row_start: list[int],
    tree_rows: list[int] | None = None,
    parents: Tensor | None = None,
    max_path: int = 8,
    width: int | None = None,
) -> tuple[list, list, list]:
    batch = len(row_start) - 1
    path = torch.full((batch, max_path), -7, dtype=torch.int32)
    emitted = torch.full((batch, width or max_path), -7, dtype=torch.int64)
    num_emitted = torch.full((batch,), -7, dtype=torch.int32)
    rows = None if tree_rows is None else ints(tree_rows)
    ops.tree_accept(tokens, targets, ints(row_start), rows, parents, path, emitted, num_emitted)
    return path.tolist(), emitted.tolist(), num_emitted.tolist()


def expected(
    tokens: list[int], targets: list[int], parents: list[int], max_path: int, width: int
) -> tuple[list[int], list[int], int]:
    if not tokens:
        return [0] * max_path, [0] * width, 0
    path = [0]
    while len(path) < max_path:
        children = [
            n
            for n in range(1, len(tokens))
            if parents[n] == path[-1] and tokens[n] == targets[path[-1]] and tokens[n] >= 0
        ]
        if not children:
            break
        path.append(min(children))
    emitted = [targets[n] for n in path]
    count = len(path)
    return path + path[-1:] * (max_path - count), emitted + [0] * (width - count), count


def random_parents(num_tokens: int, num_padding: int = 0) -> list[int]:
    parents = [-1] + [int(torch.randint(0, node, ())) for node in range(1, num_tokens)]
    return parents + [-1] * num_padding


@pytest.mark.parametrize("num_nodes", [1, 2, 7, 16, 31, 100, 255])
@pytest.mark.parametrize("max_path", [1, 3, 8, 33])
def test_random_trees(num_nodes: int, max_path: int) -> None:
    batch, width = 6, max_path + 2
    parents = [random_parents(num_nodes + 1 - 5 * (b == 2) * (num_nodes > 5), 0) for b in range(4)]
    parents = [p + [-1] * (num_nodes + 1 - len(p)) for p in parents]
    lens = [num_nodes + 1, 0, num_nodes + 1, 1, min(5, num_nodes + 1), num_nodes + 1]
    tree_rows = [3, 1, 2, 0, 1, -1]
    row_start = torch.tensor([0, *lens]).cumsum(0).tolist()
    # Few distinct tokens, so that walks are long and siblings may be equal.
    tokens = torch.randint(-1, 2, (row_start[-1],))
    targets = torch.randint(-1, 2, (row_start[-1],))
    got = accept(tokens, targets, row_start, tree_rows, ints(parents), max_path, width)
    for b in range(batch):
        rows = slice(row_start[b], row_start[b + 1])
        tree = parents[tree_rows[b]] if tree_rows[b] >= 0 else list(range(-1, lens[b] - 1))
        want = expected(tokens[rows].tolist(), targets[rows].tolist(), tree, max_path, width)
        assert (got[0][b], got[1][b], got[2][b]) == want


def test_chains_without_trees() -> None:
    tokens = ints([9, 5, 6, 7, 9, 5, 6], torch.int64)
    targets = ints([5, 6, 8, 1, 4, 6, 2], torch.int64)
    path, emitted, num_emitted = accept(tokens, targets, [0, 4, 7], max_path=4)
    assert path == [[0, 1, 2, 2], [0, 0, 0, 0]]
    assert emitted == [[5, 6, 8, 0], [4, 0, 0, 0]]
    assert num_emitted == [3, 1]


def test_equal_siblings_go_to_the_lower_node() -> None:
    tokens, targets = ints([0, 4, 4, 8], torch.int64), ints([4, 8, 8, 1], torch.int64)
    parents = ints([[-1, 0, 0, 2]])
    assert accept(tokens, targets, [0, 4], [0], parents, max_path=3)[0] == [[0, 1, 1]]


def test_padding_is_never_accepted() -> None:
    """Token 0 and parent -1: a target of 0 must not reach it, nor one of -1 a token of -1."""
    tokens, parents = ints([3, 0, 0, -1], torch.int64), ints([[-1, -1, -1, 0]])
    assert accept(tokens, ints([0, 0, 0, 0], torch.int64), [0, 4], [0], parents)[2] == [1]
    assert accept(tokens, ints([-1, 0, 0, 0], torch.int64), [0, 4], [0], parents)[2] == [1]


def test_rows_before_and_after_are_not_read() -> None:
    tokens = ints([5, 5, 0, 5, 6, 5, 5], torch.int64)
    targets = ints([5, 5, 5, 6, 7, 5, 5], torch.int64)
    assert accept(tokens, targets, [2, 5])[2] == [3]


def test_empty_batch() -> None:
    assert accept(ints([], torch.int64), ints([], torch.int64), [0]) == ([], [], [])


def test_errors() -> None:
    tokens = torch.zeros(5, dtype=torch.int64)
    parents = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"rows of a tree must be in \[0, 4\], got 5"):
        accept(tokens, tokens, [0, 5], [0], parents)
    with pytest.raises(ValueError, match=r"row_start must be ascending.* got -1"):
        accept(tokens, tokens, [1, 0])
    with pytest.raises(ValueError, match=r"max_path must be in \[1, 33\], got 34"):
        accept(tokens, tokens, [0, 5], max_path=34)
    with pytest.raises(ValueError, match=r"emitted_width must be at least 8, got 7"):
        accept(tokens, tokens, [0, 5], width=7)
    with pytest.raises(ValueError, match=r"parents must be a pointer, got NULL"):
        accept(tokens, tokens, [0, 5], [0])
    with pytest.raises(ValueError, match=r"targets must be torch.int64 \[5\].* got torch.int32"):
        accept(tokens, tokens.int(), [0, 5])


def test_opcheck() -> None:
    rows = torch.randint(0, 3, (9,))
    out = (
        torch.zeros(2, 4, dtype=torch.int32),
        torch.zeros(2, 5, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int32),
    )
    parents = ints([[-1, 0, 0, 1, 1]])
    op = torch.ops.kdtree.tree_accept.default
    torch.library.opcheck(op, (rows, rows, ints([0, 5, 9]), ints([0, -1]), parents, *out))
    torch.library.opcheck(op, (rows, rows, ints([0, 5, 9]), None, None, *out))
