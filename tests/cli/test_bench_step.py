"""`kdtree bench step`: a trace taken apart, and the command with fake engines."""

import json
from dataclasses import asdict
from pathlib import Path
from xml.dom import minidom

import pytest
from cli_fakes import result, write_model

from kdtree_runner.cli import supervise
from kdtree_runner.cli.main import main
from kdtree_runner.cli.trace import MARK, Profile, summarize


def event(category: str, name: str, start: float, length: float, **fields: object) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, **fields}


def part(name: str, start: float, length: float, thread: int = 1) -> dict:
    return event("user_annotation", MARK + name, start, length, tid=thread)


def launch(start: float, number: int, name: str = "cudaLaunchKernel") -> dict:
    return event("cuda_runtime", name, start, 1, tid=1, args={"correlation": number})


def kernel(start: float, length: float, number: int, name: str = "gemm") -> dict:
    return event("kernel", name, start, length, args={"correlation": number})


def step(at: float) -> list[dict]:
    """A step of 100: prepare with a verify inside, sampler, a draft whose graph holds ours too."""
    number = int(at) * 10
    graph = "cudaGraphLaunch"
    return [
        part("prepare", at, 30),
        part("verify", at + 10, 10),
        launch(at + 2, number),
        kernel(at + 3, 4, number, "copy"),
        launch(at + 12, number + 1, graph),
        kernel(at + 15, 20, number + 1),
        kernel(at + 33, 4, number + 1, "attend"),  # overlaps for 2
        part("sampler", at + 40, 10),
        launch(at + 41, number + 2),
        kernel(at + 45, 5, number + 2, "kdtree::cuda::(anonymous)::accept_kernel(int)"),
        event("cpu_op", "kdtree::kv_commit", at + 44, 2, tid=1),
        part("draft", at + 60, 20),
        launch(at + 61, number + 3, graph),
        kernel(at + 62, 8, number + 3),
        kernel(at + 70, 3, number + 3, "void kdtree::cuda::select_kernel<4>()"),
        event("cuda_runtime", "cudaEventSynchronize", at + 65, 10, tid=1, args={}),
        event("cuda_runtime", "cudaEventSynchronize", at + 85, 7, tid=2, args={}),  # not ours
        launch(at + 96, number + 4),
        kernel(at + 97, 1, number + 4, "gather"),
    ]


def test_parts_of_a_step() -> None:
    events = [e for i in range(4) for e in step(100.0 * i)]
    events.append({"ph": "M", "name": "process_name"})
    found = summarize(events, skip=2)
    assert found.num_steps == 2
    assert found.device == {
        "prepare": 4,
        "verify": 22,
        "accept": 5,
        "draft": 8,
        "build": 3,
        "other": 1,
    }
    assert found.host == {"prepare": 20, "verify": 10, "sampler": 8, "commit": 2, "draft": 20}
    assert found.waits == 10
    assert found.launches == {"prepare": 1, "verify": 1, "sampler": 1, "draft": 1, "other": 1}
    assert found.step == pytest.approx((400 - 200 - 20) / 2)  # to the end of the last range
    assert found.kernels["verify"][0] == ("gemm", 20, 1)


def test_a_trace_without_enough_steps() -> None:
    assert summarize(step(0.0), skip=2).num_steps == 0


HOST = {"verify": 900.0, "draft": 300.0, "schedule": 100.0, "outputs": 200.0}


def profiles(device: dict[str, float]) -> dict:
    launches = {"verify": 2.0, "draft": 3.5} if device else {}
    profile = Profile(4, 2000.0, 500.0, device, HOST, launches=launches)
    found = {"batch": 1, "step_us": 1500.0, "num_tokens": 12, "num_steps": 4}
    return {"batches": [found | {"profile": asdict(profile)}], "num_tokens": 12, "graphs": {}}


@pytest.mark.parametrize(
    ("device", "rest"),
    [({"verify": 800.0, "build": 100.0}, "host (GPU idle)"), ({}, "host, the rest")],
)
def test_bench_step(
    device: dict[str, float],
    rest: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    jobs = []

    def run_job(job, log_dir, on_event, silence_seconds):
        jobs.append(job)
        return result([], **profiles(device))

    monkeypatch.setattr(supervise, "run_job", run_job)
    pair = ["--model", write_model(tmp_path / "t"), "--drafter", write_model(tmp_path / "d")]
    out, plot = tmp_path / "x.json", tmp_path / "x.svg"
    files = ["--json", str(out), "--plot", str(plot)]
    assert main(["bench", "step", *pair, "--tree-budget", "8", "--num-steps", "4", *files]) == 0
    assert [job.mode.label for job in jobs] == ["plain", "chain", "tree 8"]
    assert jobs[0].to_dict()["task"] == "profile"
    assert jobs[0].to_dict()["num_steps"] == 4
    table = {
        line.split("|")[1].strip(): [part.strip() for part in line.split("|")[2:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    }
    assert table["verify"] == ["0.800" if device else "0.900"] * 3
    assert table[rest] == ["0.600" if device else "0.500"] * 3
    assert table["schedule on the host"] == ["0.100"] * 3
    assert table["outputs on the host"] == ["0.200"] * 3
    assert table["runner on the host"] == ["0.700"] * 3
    assert table.get("launches by the host") == (["5.5"] * 3 if device else None)
    assert table["tokens a step"] == ["3.00"] * 3
    assert set(json.loads(out.read_text())["modes"]) == {"plain", "chain", "tree 8"}
    minidom.parse(str(plot))
