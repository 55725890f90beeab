"""`kdtree bench ops` without a GPU: operators and peers run on the CPU, the clock is faked."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_fakes import fake_flash_attn, fake_flashmla

from kdtree_runner.cli import (
    bench_calls,
    bench_ops,
    bench_peers,
    bench_report,
    bench_shapes,
    bench_timing,
)
from kdtree_runner.cli.bench_peers import Missing, Peer
from kdtree_runner.cli.bench_shapes import (
    AcceptShape,
    BuildShape,
    CommitShape,
    VerifyShape,
    card_of,
)
from kdtree_runner.cli.bench_timing import Timing
from kdtree_runner.cli.main import main, make_parser

CPU = torch.device("cpu")
SMALL = [
    BuildShape(2, vocab=3000),
    BuildShape(2, vocab=3000, logits="float32"),
    BuildShape(2, vocab=3000, part="candidates"),
    BuildShape(2, vocab=3000, part="select"),
    BuildShape(2, num_nodes=40, topk=20, vocab=500),
    VerifyShape(2, 5, 4, 70),
    VerifyShape(2, 5, 4, 70, "fp8", "plan + layer"),
    AcceptShape(3),
    CommitShape(2, "moved", num_layers=3),
    CommitShape(2, "identity", num_layers=3),
    CommitShape(2, "accept + commit", num_layers=3),
]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that passes for a GPU, and a clock that says 2 microseconds."""

    def timed(call, in_graph: bool = True) -> Timing:
        call()
        return Timing((1.0, 2.0, 3.0), in_graph)

    monkeypatch.setattr(bench_ops, "check_machine", lambda: None)
    monkeypatch.setattr(bench_ops, "current_device", lambda: CPU)
    monkeypatch.setattr(bench_timing, "in_graph", timed)
    monkeypatch.setattr(bench_timing, "on_host", lambda call: timed(call, False))
    monkeypatch.setattr(bench_timing, "warm_up", lambda: None)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(bench_shapes, "shapes", lambda *_: SMALL)


def timed_peers(shape: bench_shapes.Shape) -> dict[str, bench_report.Outcome]:
    return bench_ops.measure(shape, bench_shapes.PEERS, lambda _: None).peers


# ---- shapes and floors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "floor"),
    [
        ((1, 1, 8, 2048), 0.55),
        ((1, 9, 8, 32768), 8.82),
        ((1, 9, 16, 32768), 13.0),
        ((8, 65, 64, 32768), 3009.72),
        ((32, 9, 16, 2048), 26.11),
    ],
)
def test_floors_of_an_h200(shape: tuple[int, int, int, int], floor: float) -> None:
    card = card_of("NVIDIA H200")
    assert card is not None
    assert VerifyShape(*shape).least(card) == pytest.approx(floor, rel=0.01)


def test_floors_of_other_operators() -> None:
    h200, rtx = bench_shapes.CARDS
    assert BuildShape(1).least(h200) == pytest.approx(0.53, rel=0.02)
    assert BuildShape(32).least(rtx) == pytest.approx(41, rel=0.02)
    assert CommitShape(1, "identity").least(h200) == 0
    assert CommitShape(32).least(rtx) == pytest.approx(17.6, rel=0.02)
    assert VerifyShape(1, 1, 8, 32768, "fp8").least(h200) == pytest.approx(4.4, rel=0.01)
    assert card_of("NVIDIA GH200 480GB") is None


def test_shapes() -> None:
    few = bench_shapes.shapes(bench_shapes.OPS, False, "bf16")
    every = bench_shapes.shapes(bench_shapes.OPS, True, "fp8")
    assert set(few) <= {*bench_shapes.shapes(bench_shapes.OPS, True, "bf16")}
    assert sum(shape.op == "verify_attn" for shape in every) == 84 + 4 + 3
    assert len(set(every)) == len(every)
    only = bench_shapes.shapes(("tree_accept",), False, "bf16")
    assert {shape.op for shape in only} == {"tree_accept"}
    assert [shape.op for shape in few] == sorted(
        (shape.op for shape in few), key=bench_shapes.OPS.index
    )


# ---- operators and peers, for real ---------------------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("shape", SMALL, ids=lambda shape: f"{shape.op}, {shape.label}")
def test_every_operator_and_every_peer_that_a_cpu_has(shape: bench_shapes.Shape) -> None:
    row = bench_ops.measure(shape, bench_shapes.PEERS, lambda _: None)
    assert row.ours.timing is not None, row.ours.problem
    for name, peer in row.peers.items():
        if peer.timing is None:
            assert str(peer.problem).startswith("missing: "), name
    if not isinstance(shape, VerifyShape) and row.peers:
        assert any(peer.timing is not None for peer in row.peers.values())


def test_heap_finds_the_best_prefixes() -> None:
    log_probs = [[-0.1, -2.0, -3.0], [-0.5, -1.0, -4.0]]
    nodes = bench_peers.best_first(log_probs, 4)
    assert [(parent, depth, rank) for _, parent, depth, rank in nodes] == [
        (0, 1, 0),
        (1, 2, 0),
        (1, 2, 1),
        (0, 1, 1),
    ]
    assert [score for score, *_ in nodes] == pytest.approx([-0.1, -0.6, -1.1, -2.0])
    assert len(bench_peers.best_first(log_probs, 99)) == 3 + 9


@pytest.mark.parametrize(("length", "splits"), [(1, 1), (2057, 4), (2600, 8), (32777, 64)])
def test_triton_splits(length: int, splits: int) -> None:
    assert bench_peers.triton_splits(length, 132) == splits
    assert bench_peers.triton_splits(10**6, 132) == 264


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_vllms_kernels_get_what_they_take(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    import vllm.v1.attention.ops as vllm_ops

    monkeypatch.setattr(bench_peers, "import_vllm", lambda: "0.32.0")
    for module in (fake_flashmla(), fake_flash_attn()):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(vllm_ops, "flashmla", sys.modules[f"{vllm_ops.__name__}.flashmla"], False)
    monkeypatch.setattr(bench_peers, "ATTENTION", bench_peers.ATTENTION[:2])
    monkeypatch.setitem(bench_peers.PEERS, VerifyShape, bench_peers.ATTENTION[:2])
    peers = timed_peers(VerifyShape(2, 5, 4, 70, dtype))
    assert peers["FlashMLA"].timing is not None, peers["FlashMLA"].problem
    if dtype == "fp8":
        assert peers["FA3-MLA"].problem == "missing: vLLM's FLASH_ATTN_MLA has no float8 cache"
    else:
        assert peers["FA3-MLA"].timing is not None, peers["FA3-MLA"].problem


# ---- peers that do not come to a time ------------------------------------------------------------


def replace_peers(monkeypatch: pytest.MonkeyPatch, *peers: Peer) -> None:
    monkeypatch.setitem(bench_peers.PEERS, AcceptShape, peers)


def broken(x):
    raise RuntimeError("no\n such   kernel")


def absent(x):
    raise Missing("not built")


def wrong(x):
    return lambda: [[0]]


@pytest.mark.usefixtures("on_cpu")
def test_a_peer_that_fails_is_shown_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    makers = {"bad": broken, "none": absent, "wrong": wrong, "good": bench_peers.cpu_walk}
    check = bench_peers.check_walk
    replace_peers(monkeypatch, *(Peer(n, "cpu", make, check) for n, make in makers.items()))
    monkeypatch.setattr(bench_shapes, "shapes", lambda *_: [AcceptShape(1), AcceptShape(2)])
    out = tmp_path / "report.json"
    assert main(["bench", "ops", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "- tree_accept, bad: failed: RuntimeError: no such kernel [all shapes]" in printed
    assert "- tree_accept, none: missing: not built [all shapes]" in printed
    assert "- tree_accept, wrong: failed: ValueError: its paths differ from ours" in printed
    row = next(line for line in printed.splitlines() if "1, 16, 7" in line).split("|")
    assert [cell.strip() for cell in row[2:-1]][-5:] == [
        "failed",
        "missing",
        "failed",
        "2.0 (1.00)",
        "1.00",
    ]
    report = json.loads(out.read_text())
    assert report["rows"][0]["peers"]["bad"]["problem"] == "failed: RuntimeError: no such kernel"
    assert report["rows"][1]["peers"]["good"]["us"] == 2.0


@pytest.mark.usefixtures("on_cpu")
def test_a_lost_context_ends_the_run_and_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def dead() -> None:
        raise RuntimeError("an illegal memory access")

    def breaks(x):
        if x.batch == 2:
            monkeypatch.setattr(torch.cuda, "synchronize", dead)
            raise RuntimeError("boom")
        return bench_peers.cpu_walk(x)

    replace_peers(monkeypatch, Peer("bad", "cpu", breaks, bench_peers.check_walk))
    todo = [AcceptShape(1), AcceptShape(2), AcceptShape(3)]
    monkeypatch.setattr(bench_shapes, "shapes", lambda *_: todo)
    out = tmp_path / "report.json"
    assert main(["bench", "ops", "--json", str(out)]) == 3
    shown = capsys.readouterr()
    assert "bad broke the GPU's context: RuntimeError: boom; not measured" in shown.err
    assert "tree_accept 2, 16, 7; tree_accept 3, 16, 7" in shown.err
    assert "1 of 3 shapes" in shown.out
    assert len(json.loads(out.read_text())["rows"]) == 1


@pytest.mark.usefixtures("on_cpu")
def test_our_own_failure_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(shape, device):
        raise ValueError("no such size")

    monkeypatch.setattr(bench_calls, "make_inputs", fail)
    monkeypatch.setattr(bench_shapes, "shapes", lambda *_: [AcceptShape(1)])
    assert main(["bench", "ops"]) == 3
    printed = capsys.readouterr().out
    assert "tree_accept, ours: failed: ValueError: no such size" in printed
    assert "tree_accept, CPU walk: failed: its inputs were not made" in printed


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("on_cpu")
def test_everything_small(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    assert main(["bench", "ops", "--json", str(out), "--peers", "torch,cpu"]) == 0
    printed = capsys.readouterr().out
    assert "gpu: NVIDIA H200" in printed
    assert f"{len(SMALL)} of {len(SMALL)} shapes" in printed
    report = json.loads(out.read_text())
    assert len(report["rows"]) == len(SMALL)
    assert {"gpu", "driver", "torch", "vllm", "floor", "times"} <= report["conditions"].keys()
    assert report["rows"][0]["ours"]["samples"] == [1.0, 2.0, 3.0]


def test_refused_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["bench", "ops"]) == 2
    assert "kdtree bench ops: device: wanted a CUDA GPU, got 'none" in capsys.readouterr().err


def test_refused_with_a_library_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kdtree_runner import native
    from kdtree_runner.cli import devices

    gpu = {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 139.8}
    monkeypatch.setattr(devices, "gpus", lambda: [gpu])
    monkeypatch.setattr(native, "build_info", lambda: "cpu")
    assert main(["bench", "ops"]) == 3
    assert "wanted CUDA operators for NVIDIA H200, got 'cpu'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ops", "topk"], "--ops: wanted some of tree_build,verify_attn"),
        (["--peers", "torch,fa4"], "--peers: wanted some of torch,flashmla,fa3,triton,cpu"),
        (["--shapes", "many"], "--shapes: invalid choice"),
        (["--json", "/no/such/folder/x"], "--json: wanted a regular file in an existing directory"),
    ],
)
def test_mistakes(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        make_parser().parse_args(["bench", "ops", *flags])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_flags() -> None:
    args = make_parser().parse_args(["bench", "ops", "--ops", "kv_commit,tree_build"])
    assert args.command == "bench ops"
    assert args.ops == ("tree_build", "kv_commit")
    assert args.peers == bench_shapes.PEERS
    assert make_parser().parse_args(["bench", "ops", "--peers", "none"]).peers == ()


def test_timing() -> None:
    timing = Timing((10.0, 11.0, 12.0, 13.0, 30.0))
    assert timing.median == 12.0
    assert timing.spread == pytest.approx(2 / 12)
    assert Timing((5.0,)).spread == 0
    assert [bench_timing.num_replays(us) for us in (5.0, 1000.0, 1e6)] == [31, 20, 7]


def test_driver_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert bench_report._driver() == "unknown (FileNotFoundError)"
    monkeypatch.setattr(
        bench_report.subprocess,
        "run",
        lambda *args, **kwargs: SimpleNamespace(stdout="580.1, 700 W\n"),
    )
    assert bench_report._driver() == "580.1, 700 W"


# ---- what the documents say ----------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs"


LATENCY = 5.0  # microseconds; below it no published kernel gets on such a card


def model_table(card: bench_shapes.Card, share: float) -> str:
    """Markdown: the floor of each kernel in microseconds, and a time of `share` of that speed."""
    lines = [f"| kernel | sizes | floor | at {share:.0%} |", "|---|---|---|---|"]
    for shape in bench_shapes.shapes(bench_shapes.OPS, False, "bf16"):
        floors = [shape.least(card)]
        if isinstance(shape, VerifyShape):
            floors.append(replace(shape, dtype="fp8").least(card))
        floor = " / ".join(f"{us:.1f}" for us in floors)
        times = [us / share for us in floors]
        expected = " / ".join(f"{us:.0f}" if us > LATENCY else "latency" for us in times)
        sizes = ", ".join(
            value if name in ("part", "logits", "what") else f"{name} {value}"
            for name, value in zip(shape.columns.split(", "), shape.label.split(", "), strict=True)
        )
        lines.append(f"| {shape.op} | {sizes} | {floor} | {expected} |")
    return "\n".join(lines)


def test_times_expected_on_sm_120_are_the_models() -> None:
    rtx = card_of("NVIDIA RTX PRO 6000 Blackwell Server Edition")
    assert rtx is not None
    table = model_table(rtx, 0.7)
    assert table in (DOCS / "kernels.md").read_text(), f"docs/kernels.md must have\n{table}"


def test_every_command_in_the_benchmarks_parses() -> None:
    text = (DOCS / "benchmarks.md").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line.startswith("    kdtree ")]
    assert len(lines) >= 3
    for _, *arguments in map(shlex.split, lines):
        make_parser().parse_args(arguments)
