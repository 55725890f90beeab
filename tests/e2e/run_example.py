"""Runs an example as `python EXAMPLE` would, then puts more requests to the engine that it made.

    python run_example.py EXAMPLE IN.json OUT.json

IN.json: "arguments", more arguments of LLM; "requests", each a prompt's token ids and the options
of its SamplingParams. OUT.json: "tokens" of each completion of each request; "states", the digest
of each rank's trees after them; "gathered", shapes that each rank put into gathers; "places", where
each rank is; "backend", how the workers were started.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

ENGINES: list[Any] = []


def tree_digest(worker: Any) -> str:
    """SHA-256 of all trees, paths and drafter inputs of one rank."""
    runner = worker.worker.model_runner if hasattr(worker, "worker") else worker.model_runner
    parts = hashlib.sha256()
    for name, value in sorted(vars(runner.tree_state).items()):
        if hasattr(value, "numpy"):
            parts.update(name.encode() + value.numpy().tobytes())
    parts.update(runner.speculator.tree_tokens.numpy().tobytes())
    return parts.hexdigest()


def watch_gathers(worker: Any) -> None:
    """Note the shape of every tensor that this rank gathers from now on."""
    from vllm.distributed import get_tp_group

    link = get_tp_group().device_communicator
    worker.gathered = set()
    for name in ("all_gather", "all_gatherv", "gather") if link is not None else ():
        method = getattr(link, name)

        def noted(tensor: Any, *args: Any, method: Any = method, **kwargs: Any) -> Any:
            worker.gathered.add(tuple(tensor.shape))
            return method(tensor, *args, **kwargs)

        setattr(link, name, noted)


def gathered(worker: Any) -> list[tuple[int, ...]]:
    """The shapes that watch_gathers noted."""
    return sorted(worker.gathered)


def place(worker: Any) -> dict[str, Any]:
    """The machine of this rank, as the system and Ray name it, and what its ranks speak through."""
    from vllm.distributed import get_tp_group

    link = getattr(get_tp_group().device_communicator, "dist_module", None)
    found = {
        "host": socket.gethostname(),
        "network": os.readlink("/proc/self/ns/net"),
        "memory": os.stat("/dev/shm").st_dev,
        "link": getattr(link, "__name__", type(link).__name__),
    }
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        import ray

        found["node"] = ray.get_runtime_context().get_node_id()
        found["address"] = ray.util.get_node_ip_address()
    return found


def main() -> None:
    example, given, result = sys.argv[1:]
    asked = json.loads(Path(given).read_text())
    import vllm

    class RecordedLLM(vllm.LLM):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**(arguments | asked["arguments"]))
            ENGINES.append(self)

    vllm.LLM = RecordedLLM  # type: ignore[misc]
    runpy.run_path(example, run_name="__main__")
    (llm,) = ENGINES
    prompts = [{"prompt_token_ids": r["prompt"]} for r in asked["requests"]]
    params = [vllm.SamplingParams(**r["options"]) for r in asked["requests"]]
    llm.collective_rpc(watch_gathers)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    backend = llm.llm_engine.vllm_config.parallel_config.distributed_executor_backend
    answer = {
        "tokens": [[list(c.token_ids) for c in output.outputs] for output in outputs],
        "states": llm.collective_rpc(tree_digest),
        "gathered": llm.collective_rpc(gathered),
        "places": llm.collective_rpc(place),
        "backend": backend if isinstance(backend, str) else backend.__name__,
    }
    Path(result).write_text(json.dumps(answer))


if __name__ == "__main__":  # spawned workers import this file again
    main()
