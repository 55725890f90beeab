"""tree_place against plain Python, and what tree_accept keeps of a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdtree_runner import ops


def ints(values: list, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def batch_of(num_nodes: int, seed: int = 0) -> dict[str, Tensor]:
    """Requests of 1 to T rows, some after more query tokens; slots in no order."""
    torch.manual_seed(seed)
    batch, num_slots, width = 6, 9, num_nodes + 1
    num_rows = torch.randint(1, width + 1, (batch,))
    num_rows[0], num_rows[1] = width, 1
    extra = torch.randint(0, 4, (batch,))
    zero = torch.zeros(1, dtype=torch.int64)
    query_start_loc = torch.cat([zero, (num_rows + extra).cumsum(0)])
    start = torch.randint(0, 60, (batch,))
    positions = [torch.arange(s, s + n) for s, n in zip(start, num_rows + extra, strict=True)]
    return {
        "query_start_loc": query_start_loc.int(),
        "row_start": torch.cat([zero, num_rows.cumsum(0)]).int(),
        "slots": torch.randperm(num_slots)[:batch],
        "prompt_lens": torch.randint(0, 60, (num_slots,)).int(),
        "depths": torch.randint(0, 8, (num_slots, width)).int(),
        "input_ids": torch.randint(0, 99, (int(query_start_loc[-1]),)).int(),
        "positions": torch.cat(positions),
        "tree_rows": torch.full((num_slots,), -7, dtype=torch.int32),
        "tokens": torch.full((int(num_rows.sum()),), -7),
        "row_positions": torch.full((int(num_rows.sum()),), -7),
    }


@pytest.mark.parametrize("num_nodes", [1, 4, 16, 255])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_batches(num_nodes: int, seed: int) -> None:
    batch = batch_of(num_nodes, seed)
    in_sequence = batch["positions"].tolist()
    ops.tree_place(**batch)
    want = list(in_sequence)
    placeholders = 0
    for b, slot in enumerate(batch["slots"].tolist()):
        rows = range(int(batch["row_start"][b]), int(batch["row_start"][b + 1]))
        root = int(batch["query_start_loc"][b + 1]) - len(rows)
        base = in_sequence[root]
        assert batch["tree_rows"][b] == (slot if len(rows) > 1 else -1)
        for node, row in enumerate(rows):
            if node:
                want[root + node] = base + int(batch["depths"][slot, node])
            inside = node > 0 and base < int(batch["prompt_lens"][slot])
            placeholders += inside
            assert batch["tokens"][row] == (-1 if inside else batch["input_ids"][root + node])
            assert batch["row_positions"][row] == want[root + node]
    assert batch["positions"].tolist() == want
    assert batch["tree_rows"][6:].tolist() == [-1] * 3
    assert placeholders or num_nodes < 16


def test_accept_keeps_the_step() -> None:
    """Positions in sequence again, and counts as vLLM's get_num_sampled_and_rejected has them."""
    batch = batch_of(16)
    in_sequence = batch["positions"].clone()
    ops.tree_place(**batch)
    num_reqs = len(batch["slots"])
    targets = torch.randint(0, 99, batch["tokens"].shape)
    parents = torch.full_like(batch["depths"], 0)
    parents[:, 0] = -1
    path = torch.zeros(num_reqs, 8, dtype=torch.int32)
    emitted = torch.zeros(num_reqs, 17, dtype=torch.int64)
    counts = [torch.full((num_reqs,), -7, dtype=torch.int32) for _ in range(3)]
    tree = (batch["row_start"], batch["tree_rows"][:num_reqs], parents)
    kept = [batch[k] for k in ("query_start_loc", "slots", "prompt_lens", "positions")]
    ops.tree_accept(batch["tokens"], targets, *tree, path, emitted, counts[0], *kept, *counts[1:])
    assert torch.equal(batch["positions"], in_sequence)
    ends = in_sequence[batch["query_start_loc"][1:].long() - 1] + 1
    goes_on = ends < batch["prompt_lens"][batch["slots"]]
    assert goes_on.any() and not goes_on.all()
    num_rows = batch["row_start"].diff()
    assert torch.equal(counts[1], counts[0].masked_fill(goes_on, 0))
    assert torch.equal(counts[2], (num_rows - counts[0]).masked_fill(goes_on, 0))


def test_errors() -> None:
    batch = batch_of(4)
    with pytest.raises(ValueError, match=r"slots must be torch.int64 \[6\].*torch.int32"):
        ops.tree_place(**batch | {"slots": batch["slots"].int()})
    with pytest.raises(ValueError, match=r"rows of a request must be in \[0, 2\], got 5"):
        ops.tree_place(**batch | {"depths": batch["depths"][:, :2].contiguous()})
    with pytest.raises(ValueError, match=r"max_batch must be at least 6, got 5"):
        ops.tree_place(**batch | {"tree_rows": batch["tree_rows"][:5]})


def test_opcheck() -> None:
    op = torch.ops.kdtree.tree_place.default
    torch.library.opcheck(op, tuple(batch_of(4).values()))
