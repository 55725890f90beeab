"""Parts of the engine's process that need no engine."""

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from kdtree_runner.cli.child import Refused, _is_refusal, _message, acceptance, tokenize, top_gap
from kdtree_runner.config import UnsupportedError


def entry(*logprobs: float) -> dict[int, Any]:
    return {i: SimpleNamespace(logprob=value, rank=i) for i, value in enumerate(logprobs)}


def test_a_killed_engine_core_ends_its_process() -> None:
    """vLLM would wait for the dead core's outputs for ever, and so would whoever listens to us."""
    read, write = os.pipe()
    body = (
        "import sys, time; from types import SimpleNamespace as N\n"
        "from kdtree_runner.cli import child\n"
        "child.CORE_POLL_SECONDS = child.CORE_GRACE_SECONDS = 0.1\n"
        "channel = child.Channel(int(sys.argv[1]), False)\n"
        "core = N(resources=N(engine_dead=False))\n"
        "child._watch_core(N(llm_engine=N(engine_core=core)), channel)\n"
        "child._watch_core(N(llm_engine=N(engine_core=N())), channel)  # in this process\n"
        "channel.send('ready'); time.sleep(0.5)\n"
        "core.resources.engine_dead = True; time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", body, str(write)], pass_fds=[write], stdin=subprocess.PIPE
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        events = [json.loads(line) for line in pipe]
    assert process.wait(30) == 1
    assert [event["event"] for event in events] == ["ready", "error"]
    assert events[1]["message"] == "its engine core's process was ended"


def test_top_gap() -> None:
    assert top_gap(entry(-3.0, -1.0, -1.5)) == 0.5
    assert top_gap(entry(-1.0, -1.0)) == 0.0
    assert top_gap(entry(-1.0)) is None
    assert top_gap(entry(0.0, -float("inf"))) is None


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(c) for c in text]

    def apply_chat_template(self, messages: list[dict], **flags: bool) -> str:
        assert flags == {"add_generation_prompt": True, "tokenize": False}
        return "".join(m["content"] for m in messages)


def engine(max_len: int = 5, vocab: int = 128) -> SimpleNamespace:
    config = SimpleNamespace(max_model_len=max_len, get_vocab_size=lambda: vocab)
    core = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config))
    return SimpleNamespace(llm_engine=core, get_tokenizer=Tokenizer)


def test_prompts_of_each_form_become_token_ids() -> None:
    chat = [{"role": "user", "content": "ab"}]
    prompts = [{"prompt": "a"}, {"prompt_token_ids": [5, 6]}, {"messages": chat}]
    assert tokenize(engine(), prompts) == [[0, 97], [5, 6], [97, 98]]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "abcd"}, "prompt 1: wanted 1 to 4 tokens, got 5"),
        ({"prompt_token_ids": [128]}, "prompt 1: wanted token ids below 128, got 128"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(prompt: dict, message: str) -> None:
    with pytest.raises(Refused, match=message):
        tokenize(engine(), [{"prompt": "a"}, prompt])


def test_only_refusals_are_the_users_mistakes(tmp_path: Path) -> None:
    assert _is_refusal(Refused("x"))
    assert _is_refusal(UnsupportedError("x"))
    try:
        raise ValueError("from anywhere else")
    except ValueError as error:
        assert not _is_refusal(error)
    arguments = tmp_path / "vllm" / "engine" / "arg_utils.py"
    arguments.parent.mkdir(parents=True)
    arguments.write_text("raise ValueError('bad dtype')")
    try:
        runpy.run_path(str(arguments))
    except ValueError as error:
        assert _is_refusal(error)


def test_message_of_a_validation_error_is_what_was_said() -> None:
    class Model(BaseModel):
        length: int

        @field_validator("length")
        @classmethod
        def check(cls, value: int) -> int:
            raise ValueError("length: wanted 1, got 2")

    with pytest.raises(ValidationError) as caught:
        Model(length=2)
    assert _message(caught.value) == "length: wanted 1, got 2"
    assert _message(ValueError("x")) == "x"
    assert _message(AssertionError()) == "AssertionError"


def test_an_engine_does_not_outlive_the_command() -> None:
    code = (
        "from kdtree_runner.cli.child import Channel\n"
        "import os, time\n"
        "channel = Channel(os.dup(1), takes_turns=True)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"up\n"
    assert child.stdin is not None
    child.stdin.close()  # as the end of the command does
    assert child.wait(30) == -signal.SIGKILL


def test_counters_of_an_engine_with_and_without_speculation() -> None:
    def metric(name: str, **value: Any) -> SimpleNamespace:
        return SimpleNamespace(name=f"vllm:{name}", **value)

    metrics = [
        metric("num_requests_running", value=1),
        metric("spec_decode_num_drafts", value=4),
        metric("spec_decode_num_draft_tokens", value=64),
        metric("spec_decode_num_accepted_tokens", value=6),
        metric("spec_decode_num_accepted_tokens_per_pos", values=[4, 2]),
    ]
    stats = acceptance(SimpleNamespace(get_metrics=lambda: metrics))
    assert (stats.num_drafts, stats.num_accepted_per_pos) == (4, (4, 2))
    assert acceptance(SimpleNamespace(get_metrics=list)).num_drafts == 0
