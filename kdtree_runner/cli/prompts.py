"""Prompts of a check: the shipped held-out set, or a file of the user's."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kdtree_runner.cli.errors import UserError, wanted

HELDOUT = Path(__file__).resolve().parent.parent / "data" / "heldout.jsonl"
KEYS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True)
class Prompt:
    """One prompt, in exactly one of three forms.

    messages: a chat, to be put through the model's own chat template.
    """

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def load_heldout(num_prompts: int, path: Path = HELDOUT) -> list[Prompt]:
    """The first prompts of the shipped set. They come from files that training never saw."""
    if not path.is_file():
        raise UserError(f"the shipped prompts are missing: wanted the file {path}; use --prompts")
    prompts = _parse_jsonl(path, path.read_text(encoding="utf-8"))
    if not 1 <= num_prompts <= len(prompts):
        raise wanted("--num-prompts", f"an integer in [1, {len(prompts)}]", num_prompts)
    return prompts[:num_prompts]


def load_file(path: Path, num_prompts: int | None = None) -> list[Prompt]:
    """Prompts of a user's file: jsonl, or text with one prompt a line (empty lines skipped)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"--prompts: wanted a readable UTF-8 file, got {str(path)!r} ({reason})"
        ) from error
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        prompts = _parse_jsonl(path, text)
    else:
        prompts = [Prompt(prompt=line) for line in text.splitlines() if line.strip()]
    if not prompts:
        raise wanted("--prompts", "a file with at least one prompt", str(path))
    if num_prompts is not None and not 1 <= num_prompts <= len(prompts):
        raise wanted("--num-prompts", f"an integer in [1, {len(prompts)}]", num_prompts)
    return prompts[:num_prompts]


def _parse_jsonl(path: Path, text: str) -> list[Prompt]:
    rows = enumerate(text.split("\n"), start=1)  # not splitlines: JSON strings may hold U+2028
    return [_parse_row(f"{path}, line {n}", line) for n, line in rows if line.strip()]


def _parse_row(where: str, line: str) -> Prompt:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, escaped
        raise UserError(f"{where}: wanted text that UTF-8 can hold, got {error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: wanted a JSON object a line, got {error}") from error
    if not isinstance(row, dict):
        raise wanted(where, "a JSON object a line", row)
    given = [key for key in KEYS if key in row]
    if len(given) != 1:
        raise wanted(where, f"exactly one of the keys {', '.join(KEYS)}", sorted(row))
    value = row[given[0]]
    if given == ["prompt"] and not (isinstance(value, str) and value):
        raise wanted(f"{where}, prompt", "a text that is not empty", value)
    if given == ["prompt_token_ids"] and not _is_token_list(value):
        raise wanted(f"{where}, prompt_token_ids", "a list of token ids that is not empty", value)
    if given == ["messages"] and not _is_chat(value):
        raise wanted(f"{where}, messages", "a list of objects with role and content", value)
    return Prompt(**{given[0]: value})


def _is_token_list(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
    )


def _is_chat(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in value)
    )
