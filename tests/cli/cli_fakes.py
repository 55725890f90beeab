"""Stand-ins for engines: result events as a child process would send them, and a scripted child."""

import json
import sys
from pathlib import Path

from kdtree_runner.cli.engine import EngineSettings, Mode, Sampling
from kdtree_runner.cli.prompts import Prompt
from kdtree_runner.cli.report import EngineRun
from kdtree_runner.cli.supervise import Job

SETTINGS = EngineSettings(model="target", drafter="drafter", dtype="float32")
SAMPLING = Sampling(max_tokens=5)
NO_DRAFTS = dict.fromkeys(
    ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "mean_accepted", "mean_nodes"), 0
)
DRAFTS = {
    "num_drafts": 4,
    "num_draft_tokens": 64,
    "num_accepted_tokens": 6,
    "mean_accepted": 1.5,
    "mean_nodes": 16.0,
}


def record(token_ids: list[int], num_steps: int, gap: float | None = 1.0) -> dict:
    return {
        "prompt_token_ids": [1, 2, 3],
        "token_ids": token_ids,
        "finish_reason": "length",
        "top_gap": None if gap is None else [gap] * len(token_ids),
        "text": " ".join(map(str, token_ids)),
        "num_steps": num_steps,
    }


def result(records: list[dict], acceptance: dict = NO_DRAFTS, **changes: object) -> dict:
    return {
        "event": "result",
        "records": records,
        "startup_seconds": 1.0,
        "seconds": 2.0,
        "num_engine_steps": 6,
        "acceptance": acceptance,
        "dtype": "float32",
        "max_model_len": 128,
        "devices": ["some device"],
        "attention": ["KDTREE_MLA"],
        **changes,
    }


PLAIN = Mode("plain")
CONTROL = Mode("plain", is_control=True)
CHAIN = Mode("chain")
TREE = Mode("tree", 16)

TOKENS = [[7, 8, 9, 10, 11], [4, 5, 6, 7, 8]]


def run(
    mode: Mode, tokens: list[list[int]], gap: float | None = 1.0, **changes: object
) -> EngineRun:
    """A run that emitted `tokens`; speculation needs half the steps."""
    num_steps = 5 if mode.kind == "plain" else 3
    records = [record(ids, num_steps, gap) for ids in tokens]
    acceptance = NO_DRAFTS if mode.kind == "plain" else DRAFTS
    return EngineRun(mode, result(records, **({"acceptance": acceptance} | changes)))


def job(mode: Mode = TREE) -> Job:
    return Job(mode, SETTINGS, SAMPLING, [Prompt(prompt="one"), Prompt(prompt="two")])


def scripted_child(folder: Path, body: str) -> tuple[str, ...]:
    """A command in place of the real child: `body` may use send(event), job, and os, sys, time."""
    script = folder / "child.py"
    script.write_text(
        "import json, os, sys, time\n"
        "job = json.load(open(sys.argv[1]))\n"
        "pipe = os.fdopen(int(sys.argv[2]), 'w')\n"
        "def send(event):\n"
        "    pipe.write(json.dumps(event) + chr(10)); pipe.flush()\n" + body
    )
    return (sys.executable, "-S", str(script))


def write_model(folder: Path) -> str:
    """A directory that passes for a model until someone loads it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({}))
    return str(folder)
