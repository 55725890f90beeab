"""The process that looks at vLLM for `kdtree doctor`: `python -m kdtree_runner.cli.probe OUT.json`.

Importing vLLM may crash a process; this one is there for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kdtree_runner.config import ATTENTION_BACKEND


def main(argv: list[str]) -> int:
    """Write the answers to every question."""
    facts = {name: _ask(question) for name, question in QUESTIONS.items()}
    Path(argv[1]).write_text(json.dumps(facts), encoding="utf-8")
    return 0


def _ask(question: Callable[[], Any]) -> dict[str, Any]:
    """{"value": ...}, or {"error": ...} where the question cannot be answered."""
    try:
        return {"value": question()}
    except Exception as error:  # the failure is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def gpus() -> list[dict[str, Any]]:
    """CUDA devices that torch sees."""
    from kdtree_runner.cli.devices import gpus as found

    return found()


def vllm_version() -> str:
    """vLLM's version, if it is one that DDTree is written for."""
    import vllm

    from kdtree_runner.config import check_vllm_version

    check_vllm_version(vllm.__version__)
    return str(vllm.__version__)


def platform() -> dict[str, str]:
    """Device type and class of the platform that vLLM chose."""
    from vllm.platforms import current_platform

    kind = type(current_platform)
    return {"device": current_platform.device_type, "class": f"{kind.__module__}.{kind.__name__}"}


def method() -> bool:
    """Whether vLLM's engine arguments know the method "ddtree" once its plugins are loaded."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()  # type: ignore[no-untyped-call]
    return bool(getattr(EngineArgs.create_speculative_config, "kdtree", False))


def backend() -> str:
    """Class of the registered attention backend, imported."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    member = AttentionBackendEnum[ATTENTION_BACKEND]
    member.get_class()
    return str(member.get_path())


def triton() -> bool:
    """Whether vLLM admits Triton: its V2 model runner needs it."""
    import vllm.config.vllm as config  # on a CPU we hide Triton from everything but this module

    return bool(config.HAS_TRITON)


def operators() -> bool:
    """Whether the torch operators over the native library load."""
    import kdtree_runner.ops  # noqa: F401

    return True


QUESTIONS: dict[str, Callable[[], Any]] = {
    "gpus": gpus,
    "vllm": vllm_version,
    "platform": platform,
    "method": method,
    "backend": backend,
    "triton": triton,
    "operators": operators,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv))
