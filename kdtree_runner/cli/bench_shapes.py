"""What `kdtree bench ops` measures: shapes, and the least time that each can take.

Names of sizes are csrc/include/kdtree.h's. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Literal

OPS = ("tree_build", "verify_attn", "tree_accept", "kv_commit")
PEERS = ("torch", "flashmla", "fa3", "triton", "cpu")  # groups, bench_peers.py
KEY_DIM, VALUE_DIM = 576, 512
HORIZON, VOCAB = 7, 163_840  # L and V of Kimi K2.6's drafter
NUM_LAYERS, ROW_BYTES = 61, 1152  # of Kimi K2.6's latent cache in bfloat16
LOGIT_BYTES = {"bf16": 2, "float32": 4}


@dataclass(frozen=True)
class Card:
    """What bounds a kernel on a GPU. bandwidth: bytes a microsecond; tensor: FLOP a microsecond."""

    name: str
    bandwidth: float
    tensor: float

    def least(self, moved: float, flops: float = 0.0) -> float:
        """Microseconds that so many bytes and so much arithmetic take at least."""
        return max(moved / self.bandwidth, flops / self.tensor)


CARDS = (
    Card("H200", 4.3e6, 790e6),  # measured: a copy; an 8192 x 8192 x 8192 product in bfloat16
    Card("RTX PRO 6000", 1.792e6, 503.8e6),  # data sheet
)


def card_of(gpu: str) -> Card | None:
    """The model of the GPU of this name, if there is one."""
    return next((card for card in CARDS if f" {card.name}" in f" {gpu}"), None)


@dataclass(frozen=True)
class BuildShape:
    """tree_build. part: which of its halves; logits: their dtype."""

    op: ClassVar[str] = "tree_build"
    columns: ClassVar[str] = "part, logits, B, L, V, K, N"
    batch: int
    num_nodes: int = 16
    topk: int = 16
    horizon: int = HORIZON
    vocab: int = VOCAB
    part: Literal["both", "candidates", "select"] = "both"
    logits: Literal["bf16", "float32"] = "bf16"

    @property
    def label(self) -> str:
        sizes = (self.batch, self.horizon, self.vocab, self.topk, self.num_nodes)
        return ", ".join([self.part, self.logits, *map(str, sizes)])

    def least(self, card: Card) -> float:
        rows, num_tokens = self.batch * self.horizon, self.num_nodes + 1
        candidates = rows * (self.topk * 8 + 24)
        tree = self.batch * num_tokens * (8 + 4 + 4 + 4 * (self.horizon + 1))
        if self.part == "select":
            return card.least(candidates + tree)
        logits = rows * self.vocab * LOGIT_BYTES[self.logits] + candidates
        return card.least(logits + (tree if self.part == "both" else 0))


@dataclass(frozen=True)
class VerifyShape:
    """verify_attn: every request has T query tokens, a drawn tree, after a prefix of one length.

    what: a layer with the step's plan, or a plan and a layer.
    """

    op: ClassVar[str] = "verify_attn"
    columns: ClassVar[str] = "what, B, T, H, prefix"
    batch: int
    num_tokens: int  # T
    num_heads: int
    prefix: int
    dtype: Literal["bf16", "fp8"] = "bf16"
    what: Literal["layer", "plan + layer"] = "layer"

    @property
    def label(self) -> str:
        return f"{self.what}, {self.batch}, {self.num_tokens}, {self.num_heads}, {self.prefix}"

    def least(self, card: Card) -> float:
        length, rows = self.prefix + self.num_tokens, self.batch * self.num_tokens * self.num_heads
        cache = self.batch * length * KEY_DIM * (1 if self.dtype == "fp8" else 2)
        moved = cache + rows * (KEY_DIM + VALUE_DIM) * 2
        return card.least(moved, 2.0 * rows * length * (KEY_DIM + VALUE_DIM))


@dataclass(frozen=True)
class AcceptShape:
    """tree_accept: the walk down a tree whose deepest path is accepted."""

    op: ClassVar[str] = "tree_accept"
    columns: ClassVar[str] = "B, N, L"
    batch: int
    num_nodes: int = 16
    horizon: int = HORIZON

    @property
    def label(self) -> str:
        return f"{self.batch}, {self.num_nodes}, {self.horizon}"

    def least(self, card: Card) -> float:
        num_tokens = self.num_nodes + 1
        return card.least(self.batch * (num_tokens * 20 + (self.horizon + 1) * 12))


@dataclass(frozen=True)
class CommitShape:
    """kv_commit of all layers. what: a path that moves, one that does not, or accept and commit."""

    op: ClassVar[str] = "kv_commit"
    columns: ClassVar[str] = "what, B, layers, rows moved"
    batch: int
    what: Literal["moved", "identity", "accept + commit"] = "moved"
    num_layers: int = NUM_LAYERS
    num_nodes: int = 16
    horizon: int = HORIZON

    @property
    def num_moved(self) -> int:
        return 0 if self.what == "identity" else self.horizon

    @property
    def label(self) -> str:
        return f"{self.what}, {self.batch}, {self.num_layers}, {self.num_moved}"

    def least(self, card: Card) -> float:
        return card.least(2 * self.batch * self.num_layers * self.num_moved * ROW_BYTES)


Shape = BuildShape | VerifyShape | AcceptShape | CommitShape

# B, T, H, prefix.
FEW_VERIFY = (
    (1, 1, 8, 2048),
    (1, 1, 8, 32768),
    (1, 9, 8, 2048),
    (1, 9, 8, 32768),
    (1, 17, 16, 2048),
    (1, 17, 16, 32768),
    (8, 1, 8, 32768),
    (8, 9, 8, 32768),
    (8, 17, 16, 32768),
    (8, 33, 16, 32768),
    (32, 9, 16, 2048),
    (8, 65, 64, 32768),
)
PLAN_VERIFY = ((1, 9, 8, 2048), (1, 9, 8, 32768), (32, 9, 16, 2048))
LONG_VERIFY = ((1, 1, 8, 131072), (1, 9, 8, 131072), (1, 17, 16, 131072), (8, 9, 8, 131072))


def all_verify() -> Iterator[tuple[int, int, int, int]]:
    """Every shape with an anchor, and long prefixes."""
    for batch, num_tokens, num_heads, prefix in product(
        (1, 8, 32), (1, 9, 17, 33, 65), (8, 16, 64), (2048, 32768)
    ):
        if batch < 32 or num_heads < 64 or num_tokens <= 9:
            yield batch, num_tokens, num_heads, prefix
    yield from LONG_VERIFY


def build_shapes(everything: bool) -> Iterator[BuildShape]:
    """tree_build's: a vocabulary as a whole, and with all shapes its shard of 8 ranks too."""
    for part in ("both", "candidates", "select"):
        for batch in (1, 8, 32):
            yield BuildShape(batch, part=part)  # type: ignore[arg-type]
    if not everything:
        return
    for batch in (1, 32):
        yield BuildShape(batch, logits="float32")
        yield BuildShape(batch, num_nodes=64, topk=64)
        yield BuildShape(batch, num_nodes=64, topk=64, horizon=15)
        yield BuildShape(batch, part="candidates", vocab=VOCAB // 8)
        yield BuildShape(batch, part="select", num_nodes=255, topk=64, horizon=15)


def shapes(ops: tuple[str, ...], everything: bool, dtype: Literal["bf16", "fp8"]) -> list[Shape]:
    """What is measured, in order. dtype: of verify_attn's cache."""
    found: list[Shape] = []
    if "tree_build" in ops:
        found += build_shapes(everything)
    if "verify_attn" in ops:
        found += [VerifyShape(*s, dtype) for s in (all_verify() if everything else FEW_VERIFY)]
        found += [VerifyShape(*s, dtype, "plan + layer") for s in PLAN_VERIFY]
    if "tree_accept" in ops:
        found += [AcceptShape(batch) for batch in (1, 8, 32)]
        found += [AcceptShape(b, 64, 15) for b in (1, 32) if everything]
    if "kv_commit" in ops:
        for what in ("moved", "identity", "accept + commit"):
            found += [CommitShape(batch, what) for batch in (1, 8, 32)]  # type: ignore[arg-type]
    return found
