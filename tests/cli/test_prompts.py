"""Prompt files: what is taken, and what is refused by naming the line."""

import json
from pathlib import Path

import pytest

from kdtree_runner.cli.errors import UserError
from kdtree_runner.cli.prompts import HELDOUT, Prompt, load_file, load_heldout


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_text_file_is_one_prompt_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, "p.txt", "first\n\n  second\n")
    assert load_file(path) == [Prompt(prompt="first"), Prompt(prompt="  second")]


def test_jsonl_takes_three_forms(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": "a\nb\u2028c", "source": "x.py"},
        {"prompt_token_ids": [1, 2]},
        {"messages": chat},
    ]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    prompts = load_file(write(tmp_path, "p.jsonl", text))
    wanted = [Prompt(prompt="a\nb\u2028c"), Prompt(prompt_token_ids=[1, 2]), Prompt(messages=chat)]
    assert prompts == wanted
    assert prompts[1].to_dict() == {"prompt_token_ids": [1, 2]}


def test_num_prompts_takes_the_first(tmp_path: Path) -> None:
    path = write(tmp_path, "p.txt", "a\nb\nc\n")
    assert load_file(path, 2) == [Prompt(prompt="a"), Prompt(prompt="b")]
    with pytest.raises(UserError, match=r"--num-prompts: wanted an integer in \[1, 3\], got 4"):
        load_file(path, 4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: wanted a JSON object a line"),
        ("[]", "line 2: wanted a JSON object a line, got \\[\\]"),
        ('{"text": "a"}', "line 2: wanted exactly one of the keys prompt, .* got \\['text'\\]"),
        ('{"prompt": "a", "messages": []}', "line 2: wanted exactly one of the keys"),
        ('{"prompt": ""}', "line 2, prompt: wanted a text that is not empty"),
        ('{"prompt_token_ids": []}', "line 2, prompt_token_ids: wanted a list of token ids"),
        ('{"prompt_token_ids": [1, -2]}', "got \\[1, -2\\]"),
        ('{"prompt_token_ids": [true]}', "got \\[True\\]"),
        ('{"messages": ["hi"]}', "line 2, messages: wanted a list of objects"),
        ('{"prompt": "\\ud800"}', "line 2: wanted text that UTF-8 can hold"),
        (10**5 * "[", "line 2: wanted a JSON object a line"),
    ],
)
def test_bad_rows_name_their_line(tmp_path: Path, row: str, message: str) -> None:
    path = write(tmp_path, "p.jsonl", '{"prompt": "fine"}\n' + row + "\n")
    with pytest.raises(UserError, match=message):
        load_file(path)


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--prompts: wanted a readable UTF-8 file, got .*No such"):
        load_file(tmp_path / "absent.txt")
    with pytest.raises(UserError, match="--prompts: wanted a file with at least one prompt"):
        load_file(write(tmp_path, "empty.txt", "\n\n"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(UserError, match="UTF-8"):
        load_file(tmp_path / "latin.txt")


def test_missing_heldout_is_the_users_to_replace(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"shipped prompts are missing.*use --prompts"):
        load_heldout(1, tmp_path / "absent.jsonl")


@pytest.mark.skipif(not HELDOUT.is_file(), reason="the held-out prompts are not there yet")
def test_shipped_heldout_prompts_are_enough_and_differ() -> None:
    prompts = load_heldout(32)
    assert len({prompt.prompt for prompt in prompts}) == 32
    with pytest.raises(UserError, match="--num-prompts"):
        load_heldout(100_000)
