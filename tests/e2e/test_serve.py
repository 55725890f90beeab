"""`vllm serve` with DDTree (examples/serve.sh), driven by the openai client."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from engines import Baseline, Request, greedy, sampled, tokens
from processes import EXAMPLES, STOP_S, Server, user_environment

pytestmark = pytest.mark.slow

MODEL = "tiny-kimi"
DEAD_S = 90.0  # from a dead engine to the server's end
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["function", "class", "module"]},
        "lines": {"type": "integer", "minimum": 1, "maximum": 99},
        "pure": {"type": "boolean"},
    },
    "required": ["kind", "lines", "pure"],
    "additionalProperties": False,
}
GRAMMAR = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The example's server. Blank runs that a JSON grammar allows are off, as in engines.py."""
    option = json.dumps(GRAMMAR["structured_outputs_config"])
    log = tmp_path_factory.mktemp("serve") / "log"
    running = Server(log, "--structured-outputs-config", option)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.kill()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300, max_retries=0)


def ask(client: openai.OpenAI, request: Request, **more: Any) -> Any:
    """A completion of a request as the in-process tests write it."""
    options = dict(request.options)
    known = {k: options.pop(k) for k in ("temperature", "max_tokens", "seed", "n") if k in options}
    extra = {**options, **more.pop("extra_body", {}), "return_token_ids": True}
    return client.completions.create(
        model=MODEL, prompt=list(request.prompt), extra_body=extra, **known, **more
    )


def ids(answer: Any) -> list[list[int]]:
    """Token ids of each choice of a completion, or of the streamed chunks of one."""
    return [list(choice.token_ids) for choice in answer.choices]


def test_concurrent_requests(
    client: openai.OpenAI, baseline: Baseline, prompts: Sequence[tuple[int, ...]]
) -> None:
    few = prompts[:6]
    requests = [greedy(p, max_tokens=40) for p in few]
    requests += [sampled(p, seed=i, max_tokens=40) for i, p in enumerate(few)]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda r: ask(client, r), requests))
    assert [ids(a) for a in answers] == [tokens(o) for o in baseline(requests)]


def test_several_completions_of_a_seeded_request(
    client: openai.OpenAI, baseline: Baseline, prompts: Sequence[tuple[int, ...]]
) -> None:
    request = sampled(prompts[0], seed=5, max_tokens=24, n=3)
    answer = ask(client, request)
    assert ids(answer) == tokens(baseline([request])[0])
    assert len({tuple(choice) for choice in ids(answer)}) > 1


def test_stream(
    client: openai.OpenAI, baseline: Baseline, prompts: Sequence[tuple[int, ...]]
) -> None:
    request = greedy(prompts[1], max_tokens=48)
    (want,) = baseline([request])
    usage = {"include_usage": True}
    chunks = list(ask(client, request, stream=True, stream_options=usage))
    parts = [c.choices[0] for c in chunks if c.choices]
    assert "".join(p.text for p in parts) == want.outputs[0].text
    assert [t for p in parts for t in p.token_ids or []] == tokens(want)[0]
    assert parts[-1].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 48
    assert len(parts) < 48, "no chunk held more than one token: nothing was accepted"


def test_chat(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "def main():"}]
    chat = client.chat.completions
    options: Any = {"model": MODEL, "messages": messages, "temperature": 0.0, "max_tokens": 24}
    whole = chat.create(**options).choices[0]
    streamed = list(chat.create(stream=True, **options))
    text = "".join(c.choices[0].delta.content or "" for c in streamed)
    assert text == whole.message.content
    assert streamed[-1].choices[0].finish_reason == whole.finish_reason


def test_logprobs(
    client: openai.OpenAI, baseline: Baseline, prompts: Sequence[tuple[int, ...]]
) -> None:
    plain = greedy(prompts[2], max_tokens=24)
    (want,) = baseline([greedy(prompts[2], max_tokens=24, logprobs=3)])
    answer = ask(client, plain, logprobs=3).choices[0]
    assert list(answer.token_ids) == tokens(want)[0]
    steps = zip(want.outputs[0].logprobs, answer.token_ids, strict=True)
    exact = [step[token].logprob for step, token in steps]
    assert answer.logprobs.token_logprobs == pytest.approx(exact, abs=1e-3)
    assert all(len(top) >= 3 for top in answer.logprobs.top_logprobs)


def test_json_schema(client: openai.OpenAI, baseline: Baseline) -> None:
    text = "# A Python file, described as JSON:\n"
    form: Any = {"type": "json_schema", "json_schema": {"name": "file", "schema": SCHEMA}}
    messages: Any = [{"role": "user", "content": text}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, response_format=form, temperature=0.0, max_tokens=64
    )
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == set(SCHEMA["required"])
    assert found["kind"] in SCHEMA["properties"]["kind"]["enum"] and 1 <= found["lines"] <= 99


def test_stop_string(
    client: openai.OpenAI, baseline: Baseline, prompts: Sequence[tuple[int, ...]]
) -> None:
    request = greedy(prompts[3], max_tokens=64)
    text = baseline([request])[0].outputs[0].text
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    choice = ask(client, request, stop=[stop]).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"min_p": 0.1}, "min_p"), ({"logit_bias": {"5": 10.0}}, "logit_bias")],
)
def test_refused_request(
    client: openai.OpenAI,
    baseline: Baseline,
    prompts: Sequence[tuple[int, ...]],
    options: dict[str, Any],
    named: str,
) -> None:
    request = sampled(prompts[0], seed=1, max_tokens=8)
    with pytest.raises(openai.BadRequestError, match=named) as error:
        ask(client, request, extra_body=options)
    assert error.value.status_code == 400
    assert ids(ask(client, request)) == tokens(baseline([request])[0])


def test_aborted_stream(
    server: Server,
    client: openai.OpenAI,
    baseline: Baseline,
    prompts: Sequence[tuple[int, ...]],
) -> None:
    streams = [ask(client, greedy(p, max_tokens=500), stream=True) for p in prompts[:4]]
    for stream in streams:
        next(iter(stream))
        stream.close()
    end = time.monotonic() + 60
    while server.metrics()["vllm:num_requests_running"] > 0:
        assert time.monotonic() < end, "an aborted request still runs"
        time.sleep(0.2)
    request = greedy(prompts[5], max_tokens=24)  # takes the slot of an aborted one
    assert ids(ask(client, request)) == tokens(baseline([request])[0])


def test_example_client(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "serve_client.py"), f"{server.url}/v1"],
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("def factorial(n):") == 3


def test_metrics(server: Server) -> None:
    values = server.metrics()
    drafts = values["vllm:spec_decode_num_drafts_total"]
    assert values["vllm:spec_decode_num_draft_tokens_total"] <= 16 * drafts
    assert values["vllm:spec_decode_num_accepted_tokens_total"] > drafts


def test_sigterm(server: Server) -> None:
    """Last of this server's tests: it ends by itself, and leaves no process."""
    server.process.send_signal(signal.SIGTERM)
    assert server.end(STOP_S) == 0, server.text()[-4000:]
    assert server.survivors() == []


@pytest.mark.parametrize("title", ["EngineCore", "Worker"])
def test_dead_engine(title: str, tmp_path: Path) -> None:
    """A killed engine or worker ends the server with an error; it does not hang."""
    server = Server(tmp_path / "log")
    try:
        server.wait_until_ready()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model=MODEL, prompt="import os", max_tokens=900, temperature=0.0, stream=True
        )
        next(iter(stream))
        server.child(title).kill()
        with pytest.raises((openai.APIError, httpx.TransportError)):
            list(stream)
        server.end(DEAD_S)  # vLLM 0.32.0 ends with code 0 even so
        assert "EngineDeadError" in server.text()
        assert server.survivors() == []
    finally:
        server.kill()
