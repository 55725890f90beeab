"""Findings from faked and from real machines."""

import json
import sys
from pathlib import Path

import pytest

from kdtree_runner import native
from kdtree_runner.cli import doctor
from kdtree_runner.cli.doctor import examine, probe
from kdtree_runner.cli.features import (
    Machine,
    cuda_architectures,
    describe_gpu_code,
    fits,
    gpu_problems,
    support_matrix,
)
from kdtree_runner.cli.main import main
from kdtree_runner.platform import CPU_PLATFORM

GOOD = {
    "gpus": {"value": []},
    "vllm": {"value": "0.32.0"},
    "platform": {"value": {"device": "cpu", "class": CPU_PLATFORM}},
    "method": {"value": True},
    "backend": {"value": "some.Backend"},
    "triton": {"value": True},
    "operators": {"value": True},
}
H200 = {"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 139.8}
ALL = ["90a", "100f", "120f", "120"]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests look at what doctor concludes, not at how this checkout is installed."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(doctor, "_look_at_native", lambda findings: "cpu")


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ("8.0", False),
        ("9.0", True),
        ("10.0", True),
        ("10.3", True),
        ("11.0", False),
        ("12.0", True),
        ("12.1", True),
        ("13.0", True),  # by PTX
    ],
)
def test_architectures_of_the_fat_binary(capability: str, runs: bool) -> None:
    assert fits(capability, ALL) == runs


def test_a_specific_architecture_serves_no_other() -> None:
    assert not fits("9.1", ["90a"])
    assert not fits("13.0", ["120f"])
    assert not fits("9.0", [])


def test_build_info() -> None:
    assert cuda_architectures("cpu") == []
    assert cuda_architectures("cpu;cuda:90a,100f") == ["90a", "100f"]
    assert gpu_problems([], "cpu") == []
    assert gpu_problems([H200], "cpu;cuda:90a") == []
    assert "wanted CUDA operators for NVIDIA H200, got 'cpu'" in gpu_problems([H200], "cpu")[0]
    assert "wanted an architecture of 9.0" in gpu_problems([H200], "cpu;cuda:120f")[0]


def test_gpu_code_is_listed() -> None:
    assert describe_gpu_code("cpu") == "none"
    assert describe_gpu_code("cpu;cuda:90a") == "sm_90a (H100, H200)"
    assert describe_gpu_code("cpu;cuda:90a,100f,120f,120") == (
        "sm_90a (H100, H200), sm_100f (B200, B300), sm_120f (RTX PRO 6000, RTX 50), "
        "PTX 120 (GPUs to come)"
    )
    assert describe_gpu_code("cpu;cuda:103a") == "sm_103a"


def test_the_look_at_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the real look
    monkeypatch.setattr(native, "build_info", lambda: "cpu;cuda:120f,120")
    assert examine(GOOD).native["GPU code"].startswith("sm_120f")


def test_matrix_gives_a_reason_for_every_no() -> None:
    for machine in (Machine("cpu", 2, "2.60.0"), Machine("cpu", 1, None), Machine("cuda", 8, None)):
        features = {feature.name: feature for feature in support_matrix(machine)}
        assert all(feature.supported or feature.note for feature in features.values())
        assert features["tensor parallel, mp"].supported == (machine.num_ranks > 1)
        ray = machine.ray is not None and machine.num_ranks > 1
        assert features["tensor parallel, Ray"].supported == ray
        assert features["float32"].supported == (machine.device == "cpu")


def test_good_machine() -> None:
    findings = examine(GOOD)
    assert findings.problems == []
    assert findings.exit_code == 0
    assert findings.versions["python"]
    assert findings.devices
    assert json.loads(json.dumps(findings.to_dict()))["can_run"] is True


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {key: {"error": "ModuleNotFoundError: vllm"} for key in ("vllm", "platform", "method")},
            "vllm: ModuleNotFoundError: vllm",
        ),
        ({"backend": {"error": "ValueError: Unknown"}}, "backend: ValueError: Unknown"),
        ({"method": {"value": False}}, "does not know the method 'ddtree'"),
        ({"triton": {"value": False}}, "V2 model runner needs it"),
        (
            {"platform": {"value": {"device": "cpu", "class": "vllm.CpuPlatform"}}},
            f"platform: wanted {CPU_PLATFORM}, got vllm.CpuPlatform",
        ),
        ({"platform": {"value": {"device": "tpu", "class": "x"}}}, "wanted cpu or cuda, got tpu"),
        (
            {"platform": {"value": {"device": "cuda", "class": "x"}}, "gpus": {"value": [H200]}},
            "wanted CUDA operators for NVIDIA H200",
        ),
    ],
)
def test_problems(change: dict, problem: str) -> None:
    findings = examine(GOOD | change)
    assert len(findings.problems) == 1
    assert problem in findings.problems[0]
    assert findings.exit_code == 1


def test_vllm_plugins_filter_is_the_only_reason_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "kdtree_cpu,other")
    facts = GOOD | {"method": {"value": False}, "backend": {"error": "unknown"}}
    findings = examine(facts)
    assert len(findings.problems) == 1
    assert findings.problems[0].startswith("VLLM_PLUGINS: wanted it unset or with 'kdtree' in it")
    assert findings.plugins["vllm.general_plugins: kdtree"] == "off by VLLM_PLUGINS"


def test_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()  # the real look
    monkeypatch.setattr(native, "library_path", lambda: tmp_path / "absent.so")
    native.load.cache_clear()
    findings = examine(GOOD)
    native.load.cache_clear()
    assert findings.problems[0].startswith("native library: cannot load")
    assert str(tmp_path / "absent.so") in findings.problems[0]


def test_probe_that_crashes_is_a_reason(tmp_path: Path) -> None:
    crash = (sys.executable, "-c", "print('the cause'); import os; os._exit(9)")
    facts = probe((*crash,))
    assert "exit code 9" in facts["vllm"]["error"]
    findings = examine(facts)
    assert findings.exit_code == 1


def test_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "probe", lambda: GOOD)
    assert main(["doctor"]) == 0
    assert "DDTree can run here." in capsys.readouterr().out
    monkeypatch.setattr(doctor, "probe", lambda: GOOD | {"method": {"value": False}})
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["can_run"] is False
    assert {feature["name"] for feature in report["features"]} >= {"greedy decoding", "bfloat16"}
