"""`kdtree doctor`: can DDTree run here, and if not, why?"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kdtree_runner.cli.devices import cpu_name
from kdtree_runner.cli.errors import ExitCode
from kdtree_runner.cli.features import (
    Feature,
    Machine,
    describe_gpu_code,
    gpu_problems,
    support_matrix,
)
from kdtree_runner.cli.supervise import SAFE_PATH
from kdtree_runner.config import ATTENTION_BACKEND, METHOD
from kdtree_runner.platform import CPU_PLATFORM, is_cpu_build

PROBE = (sys.executable, *SAFE_PATH, "-m", "kdtree_runner.cli.probe")
PROBE_SECONDS = 300.0  # importing vLLM from a cold disk takes a minute
PROBE_TAIL = 5  # lines of its output shown when it crashed
PLUGINS = {  # group -> our entry point
    "vllm.general_plugins": "kdtree",
    "vllm.platform_plugins": "kdtree_cpu",
}


@dataclass
class Findings:
    """What there is, and every reason why DDTree cannot run."""

    versions: dict[str, str]
    devices: list[str] = field(default_factory=list)
    native: dict[str, str] = field(default_factory=dict)
    plugins: dict[str, str] = field(default_factory=dict)
    vllm: dict[str, str] = field(default_factory=dict)
    features: list[Feature] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.DIVERGED if self.problems else ExitCode.OK

    def to_dict(self) -> dict[str, Any]:
        return {"can_run": not self.problems, **asdict(self)}


def run(args: argparse.Namespace) -> ExitCode:
    """Look, and say."""
    from rich.console import Console

    with Console(stderr=True).status("looking at vLLM"):
        findings = examine(probe())
    if args.json:
        print(json.dumps(findings.to_dict(), indent=1))
    else:
        show(findings)
    return findings.exit_code


def examine(facts: Mapping[str, Mapping[str, Any]]) -> Findings:
    """Everything that can be found out. facts: the probe's answers, each a value or an error."""
    from kdtree_runner.cli.report import versions

    findings = Findings(versions())
    _look_at_plugins(findings)
    build_info = _look_at_native(findings)
    _look_at_vllm(findings, facts)
    gpus = facts.get("gpus", {}).get("value") or []
    findings.devices = [
        f"{gpu['name']}, capability {gpu['capability']}, {gpu['memory_gib']} GiB" for gpu in gpus
    ] or [cpu_name()]
    platform = facts.get("platform", {}).get("value") or {}
    if platform.get("device") == "cuda" and build_info is not None:
        findings.problems += gpu_problems(gpus, build_info)
    num_ranks = len(gpus) or os.cpu_count() or 1
    machine = Machine(platform.get("device", "cpu"), num_ranks, findings.versions.get("ray"))
    findings.features = support_matrix(machine)
    return findings


def _look_at_plugins(findings: Findings) -> None:
    """Are our entry points installed, and does VLLM_PLUGINS let vLLM load them?"""
    chosen = os.environ.get("VLLM_PLUGINS")
    for group, name in PLUGINS.items():
        points = importlib.metadata.entry_points(group=group)
        if name not in {point.name for point in points}:
            state = "not installed"
            findings.problems.append(f"plugin {name!r} of {group}: not installed; run pip install")
        elif chosen is not None and name not in chosen.split(","):
            state = "off by VLLM_PLUGINS"
            if name == PLUGINS["vllm.general_plugins"] or is_cpu_build():
                findings.problems.append(
                    f"VLLM_PLUGINS: wanted it unset or with {name!r} in it, got {chosen!r}"
                )
        else:
            state = "active"
        findings.plugins[f"{group}: {name}"] = state


def _look_at_native(findings: Findings) -> str | None:
    """Does the native library load? Returns its build info."""
    from kdtree_runner import native

    findings.native["path"] = str(native.library_path())
    try:
        findings.native["version"] = native.load().kdtree_version().decode()
        findings.native["built for"] = native.build_info()
        findings.native["GPU code"] = describe_gpu_code(native.build_info())
    except ImportError as error:
        findings.problems.append(f"native library: {error}")
        return None
    return findings.native["built for"]


def _look_at_vllm(findings: Findings, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Does vLLM load, with our platform, method and backend in it?"""
    answers = {name: fact.get("value") for name, fact in facts.items()}
    platform = answers.get("platform") or {}
    findings.vllm = {
        "version": str(answers.get("vllm")),
        "platform": f"{platform.get('device')} ({platform.get('class')})",
        f"method {METHOD!r}": "known" if answers.get("method") else "unknown",
        f"backend {ATTENTION_BACKEND}": str(answers.get("backend")),
        "Triton for the V2 model runner": "found" if answers.get("triton") else "missing",
    }
    if "error" in facts.get("vllm", {}):
        findings.problems.append(f"vllm: {facts['vllm']['error']}")
    if findings.problems:
        return  # without vLLM, our plugins or library the rest can only follow from that
    findings.problems += [f"{name}: {f['error']}" for name, f in facts.items() if "error" in f]
    if answers.get("method") is False:
        findings.problems.append(
            f"vLLM does not know the method {METHOD!r}: our plugin did not run"
        )
    if answers.get("triton") is False:
        findings.problems.append("triton: vLLM's V2 model runner needs it; run pip install triton")
    device, name = platform.get("device"), platform.get("class")
    if device == "cpu" and name != CPU_PLATFORM:
        findings.problems.append(f"platform: wanted {CPU_PLATFORM}, got {name}")
    if device not in ("cpu", "cuda", None):
        findings.problems.append(f"platform: wanted cpu or cuda, got {device}")


def probe(command: tuple[str, ...] = PROBE) -> dict[str, dict[str, Any]]:
    """Answers of the probe process; one error instead when it does not come back with any."""
    with TemporaryDirectory() as folder:
        out, log = Path(folder) / "facts.json", Path(folder) / "log"
        try:
            with log.open("wb") as sink:
                done = subprocess.run(
                    [*command, str(out)],
                    stdout=sink,
                    stderr=sink,
                    timeout=PROBE_SECONDS,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            return {"vllm": {"error": f"looking at it took over {PROBE_SECONDS:.0f} seconds"}}
        if out.is_file():
            facts: dict[str, dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))
            return facts
        tail = log.read_text(errors="replace").splitlines()[-PROBE_TAIL:]
        reason = f"looking at it ended with exit code {done.returncode}"
        return {"vllm": {"error": "\n  ".join([reason, *tail])}}


def show(findings: Findings) -> None:
    """Print the findings for a person."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    devices = {str(i): name for i, name in enumerate(findings.devices)}
    sections = {
        "versions": findings.versions,
        "devices": devices,
        "native library": findings.native,
        "plugins": findings.plugins,
        "vLLM": findings.vllm,
    }
    title_width = max(map(len, sections))
    key_width = max(len(key) for rows in sections.values() for key in rows)
    for title, rows in sections.items():
        for i, (key, value) in enumerate(rows.items()):
            head = title if i == 0 else ""
            line = f" [bold]{head:{title_width}}[/]  {key:{key_width}}  {escape(value)}"
            console.print(line, soft_wrap=True)  # a path stays whole, to be copied
    matrix = Table(title="supported here", title_justify="left", box=None)
    for name in ("", "feature", "note"):
        matrix.add_column(name)
    for feature in findings.features:
        mark = "[green]yes[/]" if feature.supported else "[yellow]no[/]"
        matrix.add_row(mark, feature.name, feature.note)
    console.print(matrix)
    for problem in findings.problems:
        console.print(f"[bold red]problem[/]: {problem}", soft_wrap=True)
    can = "[bold red]DDTree cannot run here.[/]"
    console.print(can if findings.problems else "[bold green]DDTree can run here.[/]")
