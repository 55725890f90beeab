"""Tensor parallel 2 through Ray over two machines gives the tokens of one process.

scripts/two_nodes.sh makes the machines: network, shared memory and Ray's files are of each its own.
"""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from engines import Baseline, greedy, sampled, tokens
from processes import ROOT, run_example, runs, user_environment

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
SCRIPT = ROOT / "scripts" / "two_nodes.sh"


START_S = 120.0  # of both nodes; 8 s on two free cores
END_S = 30.0  # for the system to end some thirty processes


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env=user_environment(**environment),
        capture_output=True,
        text=True,
        timeout=START_S,
    )


@pytest.fixture(scope="module", autouse=True)
def _machines() -> None:
    done = run_script("--check")
    if done.returncode != 0:
        pytest.skip(done.stderr.strip())


def test_one_rank_a_machine(
    baseline: Baseline, prompts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    seeded = [sampled(p, seed=i, max_tokens=32) for i, p in enumerate(prompts[4:8])]
    requests = [*(greedy(p, max_tokens=32) for p in prompts[:4]), *seeded]
    answer, printed = run_example(
        "ray_tp.py", requests, tmp_path, launcher=[SCRIPT], max_model_len=512
    )
    first, second = answer["places"]
    assert (first["host"], second["host"]) == ("first", "second")
    assert (first["address"], second["address"]) == ("10.77.0.1", "10.77.0.2")
    for what in ("node", "network", "memory"):
        assert first[what] != second[what], what
    assert first["link"] == second["link"] == "torch.distributed", "not through the network"
    assert answer["tokens"] == [tokens(o) for o in baseline(requests)]
    assert len(answer["states"]) == 2
    assert len(set(answer["states"])) == 1, "the ranks grew different trees"
    assert answer["backend"] == "CpuRayExecutor"
    assert "def read_lines(path):" in printed


def test_status_is_the_commands() -> None:
    count = "import ray, sys; ray.init(); sys.exit(int(10 * ray.cluster_resources()['GPU']))"
    done = run_script("python", "-c", count)
    assert done.returncode == 20, done.stderr


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_script(ending: signal.Signals, tmp_path: Path) -> None:
    started = tmp_path / "started"
    script = subprocess.Popen(
        [str(SCRIPT), "sh", "-c", 'touch "$0"; sleep 1000', str(started)],
        env=user_environment(),
        stderr=subprocess.DEVNULL,
    )
    family: list[psutil.Process] = []
    try:
        end = time.monotonic() + START_S
        while not started.exists():
            assert script.poll() is None and time.monotonic() < end
            time.sleep(0.2)
        family = psutil.Process(script.pid).children(recursive=True)
        assert sum(p.name() == "raylet" for p in family) == 2
        script.send_signal(ending)
        script.wait(END_S)
        end = time.monotonic() + END_S
        while any(map(runs, family)) and time.monotonic() < end:
            time.sleep(0.2)
        assert not [p.cmdline() for p in family if runs(p)]
    finally:
        for process in (script, *filter(runs, family)):
            process.kill()


def test_refusal_names_what_is_missing() -> None:
    done = run_script("true", PATH="/usr/sbin:/usr/bin:/sbin:/bin")
    assert done.returncode == 2
    assert "wanted ray on PATH" in done.stderr
