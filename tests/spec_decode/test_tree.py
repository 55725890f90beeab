"""Tree state, invariants, paths and drawings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtree_runner.spec_decode.tree import TreeState, chain_tree, check_tree, draw_tree, path_to

SHAPES = [(1, 1), (7, 7), (16, 7), (31, 15), (32, 32), (255, 1), (255, 32)]

# 0 -> 1 -> 3, 0 -> 2, 1 -> 4, then one padding node
PARENTS = [-1, 0, 0, 1, 1, -1]
DEPTHS = [0, 1, 1, 2, 2, 1]
ANCESTORS = [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3], [0, 1, 4], [0, 5, -1]]


def small_tree() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor(PARENTS), torch.tensor(DEPTHS), torch.tensor(ANCESTORS)


@pytest.mark.parametrize(("num_nodes", "horizon"), SHAPES)
def test_state_has_its_shapes_and_starts_as_chains(num_nodes: int, horizon: int) -> None:
    state = TreeState(3, num_nodes, horizon, "cpu")
    num_tokens, width = num_nodes + 1, horizon + 1
    assert state.num_tokens == num_tokens
    wanted = {
        "parents": ((3, num_tokens), torch.int32),
        "depths": ((3, num_tokens), torch.int32),
        "ancestors": ((3, num_tokens, width), torch.int32),
        "chain_only": ((3,), torch.bool),
        "tree_rows": ((3,), torch.int32),
        "path": ((3, width), torch.int32),
        "num_emitted": ((3,), torch.int32),
    }
    for name, (shape, dtype) in wanted.items():
        tensor = getattr(state, name)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), name
        assert tensor.is_contiguous(), name
    for slot in range(3):
        check_tree(state.parents[slot], state.depths[slot], state.ancestors[slot], num_nodes)
    assert state.tree_rows.tolist() == [-1] * 3


@pytest.mark.parametrize(("num_nodes", "horizon"), SHAPES)
def test_reset_restores_one_slot_in_place(num_nodes: int, horizon: int) -> None:
    state = TreeState(3, num_nodes, horizon, "cpu")
    per_slot = (state.parents, state.depths, state.ancestors)
    addresses = [t.data_ptr() for t in per_slot]
    for tensor in per_slot:
        tensor.fill_(77)
    state.chain_only.fill_(True)
    state.reset(1)
    chain = chain_tree(num_nodes, horizon)
    for tensor, wanted in zip(per_slot, chain, strict=True):
        assert torch.equal(tensor[1], wanted)
        assert (tensor[0] == 77).all()
        assert (tensor[2] == 77).all()
    assert state.chain_only.tolist() == [True, False, True]
    assert [t.data_ptr() for t in per_slot] == addresses


def test_chain_tree_is_a_chain_and_then_padding() -> None:
    parents, depths, ancestors = chain_tree(4, 2)
    assert parents.tolist() == [-1, 0, 1, -1, -1]
    assert depths.tolist() == [0, 1, 2, 1, 1]
    assert ancestors.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 3, -1], [0, 4, -1]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0, 4, 2), "max_num_reqs must be at least 1, got 0"),
        ((1, 0, 1), r"num_nodes must be in \[1, 255\], got 0"),
        ((1, 256, 1), r"num_nodes must be in \[1, 255\], got 256"),
        ((1, 4, 0), r"horizon must be in \[1, 4\] with 4 nodes, got 0"),
        ((1, 4, 5), r"horizon must be in \[1, 4\] with 4 nodes, got 5"),
        ((1, 64, 33), r"horizon must be in \[1, 32\] with 64 nodes, got 33"),
    ],
)
def test_state_refuses_bad_sizes(args: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeState(*args, "cpu")


def test_check_tree_takes_a_tree_with_padding() -> None:
    check_tree(*small_tree(), 5)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("parents", 0, 0, r"parents\[0\] must be -1 at the root, got 0"),
        ("parents", 2, 2, r"parents\[2\] must be -1 or an earlier node, got 2"),
        ("parents", 2, 3, r"parents\[2\] must be -1 or an earlier node, got 3"),
        ("parents", 2, -2, r"parents\[2\] must be -1 or an earlier node, got -2"),
        ("parents", 2, -1, r"parents\[3\] must be -1 after a padding node, got 1"),
        ("depths", 0, 1, r"depths\[0\] must be 0, got 1"),
        ("depths", 3, 1, r"depths\[3\] must be 2, got 1"),
        ("depths", 5, 0, r"depths\[5\] must be 1, got 0"),
        ("ancestors", (3, 1), 2, r"ancestors\[3\] must be \[0, 1, 3\], got \[0, 2, 3\]"),
        ("ancestors", (1, 2), 0, r"ancestors\[1\] must be \[0, 1, -1\], got \[0, 1, 0\]"),
        ("ancestors", (5, 1), 4, r"ancestors\[5\] must be \[0, 5, -1\], got \[0, 4, -1\]"),
    ],
)
def test_check_tree_names_what_is_broken(
    name: str, index: int | tuple[int, int], value: int, message: str
) -> None:
    parents, depths, ancestors = small_tree()
    {"parents": parents, "depths": depths, "ancestors": ancestors}[name][index] = value
    with pytest.raises(ValueError, match=message):
        check_tree(parents, depths, ancestors, 5)


def test_check_tree_refuses_wrong_shapes_and_nodes_beyond_the_horizon() -> None:
    parents, depths, ancestors = small_tree()
    with pytest.raises(ValueError, match=r"parents must have shape \(5,\), got \(6,\)"):
        check_tree(parents, depths, ancestors, 4)
    with pytest.raises(ValueError, match="node 3 must lie at depth 1 or less, got 2"):
        check_tree(parents, depths, ancestors[:, :2], 5)


def test_path_to() -> None:
    assert path_to(4, PARENTS) == [0, 1, 4]
    assert path_to(4, torch.tensor(PARENTS)) == [0, 1, 4]
    assert path_to(0, PARENTS) == [0]
    assert path_to(5, PARENTS) == [5]


def test_drawing() -> None:
    tokens = ["the", " cat", " dog", " sat", "\n", "never"]
    assert draw_tree(tokens, PARENTS, path=torch.tensor([0, 1, 4, 4])).splitlines() == [
        "the ✓",
        "├─ ·cat ✓",
        "│  ├─ ·sat",
        "│  └─ \\n ✓",
        "└─ ·dog",
    ]
    assert draw_tree(["", "\x1b[0m"], [-1, 0]).splitlines() == ["''", "└─ \\x1b[0m"]


def test_drawing_of_a_request_cut_short() -> None:
    assert draw_tree(["a", "b"], PARENTS).splitlines() == ["a", "└─ b"]
    with pytest.raises(ValueError, match=r"one entry a token \(7\), got 6"):
        draw_tree(["x"] * 7, PARENTS)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.data())
def test_drawings_show_every_node_once_below_its_parent(data: st.DataObject) -> None:
    num_nodes = data.draw(st.integers(1, 255))
    num_padding = data.draw(st.integers(0, num_nodes))
    parents = [-1]
    parents += [data.draw(st.integers(0, n)) for n in range(num_nodes - num_padding)]
    parents += [-1] * num_padding
    lines = draw_tree([f"n{i}" for i in range(num_nodes + 1)], parents).splitlines()
    drawn = []
    branch: list[tuple[int, int]] = []  # column and node of each open level
    for line in lines:
        column = line.index("n")
        branch = [entry for entry in branch if entry[0] < column]
        node = int(line[column + 1 :])
        assert (branch[-1][1] if branch else -1) == parents[node]
        branch.append((column, node))
        drawn.append(node)
    assert sorted(drawn) == list(range(num_nodes - num_padding + 1))


def test_deep_chain_is_drawn() -> None:
    lines = draw_tree(["x"] * 256, list(range(-1, 255)), path=range(256)).splitlines()
    assert len(lines) == 256
    assert all(line.endswith("x ✓") for line in lines)
