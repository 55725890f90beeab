"""The corpus: the Python standard library's sources, tokenised, with whole files held out.

    python -m examples.tiny_kimi.data --stdlib /usr/lib/python3.13 --out corpus

writes corpus/corpus.npz, corpus/tokenizer/ and corpus/heldout.jsonl. The sources are under the
PSF licence (https://docs.python.org/3/license.html).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .config import BOS, BOS_ID, EOS, EOS_ID, MASK, PAD, TargetConfig

if TYPE_CHECKING:  # tokenizers and transformers are needed to build a corpus, not to train on it
    from transformers import PreTrainedTokenizerFast

# Generated tables and third-party parcels: nothing to learn from, or not the standard library.
SKIPPED_DIRS = {"site-packages", "encodings", "pydoc_data", "ensurepip", "__pycache__"}
MAX_FILE_BYTES = 400_000
HELDOUT_ONE_IN = 32
CHAT_TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)


def is_held_out(module_path: str) -> bool:
    """Whether a file is kept out of training, from its path below the library ("json/tool.py")."""
    return hashlib.sha256(module_path.encode()).digest()[0] % HELDOUT_ONE_IN == 0


@dataclass(frozen=True)
class Source:
    """One file of the library."""

    module_path: str
    text: str


def read_sources(stdlib: Path) -> Iterator[Source]:
    """Every usable file in the order of its path."""
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if SKIPPED_DIRS.intersection(relative.parts) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield Source(relative.as_posix(), text)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose first four ids are bos, eos, pad and mask."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        mask_token=MASK,
        model_max_length=TargetConfig().yarn.max_position,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, sources: list[Source]) -> np.ndarray:
    """All files behind one another, each as bos, text, eos. Returns [num_tokens] uint16."""
    encoded = tokenizer.backend_tokenizer.encode_batch([s.text for s in sources])
    parts = [np.array([BOS_ID, *e.ids, EOS_ID], dtype=np.uint16) for e in encoded]
    return np.concatenate(parts)


def cut_prompt(tokenizer: PreTrainedTokenizerFast, text: str, rng: random.Random) -> str | None:
    """A prompt of 20 to 400 tokens that starts at a statement of column 0.

    Three in four end with a line (without its newline), the others after a word within one.
    """
    lines = text.split("\n")
    starts = [i for i, line in enumerate(lines) if line[:1].isalpha() or line[:1] == "@"]
    wanted = int(20 * 20 ** rng.random())  # log-uniform: as many in 20..40 as in 200..400
    chosen: list[str] = []
    for line in lines[rng.choice(starts) if starts else 0 :]:
        chosen.append(line)
        if len(tokenizer("\n".join(chosen)).input_ids) >= wanted:
            break
    prompt = "\n".join(chosen).rstrip()
    words = [i for i, c in enumerate(prompt) if c == " " and prompt[i - 1].isalnum()]
    if words and rng.random() < 0.25:
        prompt = prompt[: words[-1]]
    return prompt if 20 <= len(tokenizer(prompt).input_ids) <= 400 else None


def heldout_prompts(
    tokenizer: PreTrainedTokenizerFast, sources: list[Source], count: int
) -> list[dict]:
    """`count` prompts from the held-out files in turn, always the same ones."""
    rng, prompts, seen = random.Random(0), [], set()
    while len(prompts) < count:
        for source in sources:
            prompt = cut_prompt(tokenizer, source.text, rng)
            if prompt and prompt not in seen and len(prompts) < count:
                seen.add(prompt)
                prompts.append({"prompt": prompt, "source": source.module_path})
    return prompts


def build_corpus(stdlib: Path, out: Path, max_files: int | None = None, prompts: int = 192) -> None:
    """Write corpus.npz (train and heldout, uint16 token ids), tokenizer/ and heldout.jsonl."""
    sources = list(read_sources(stdlib))
    train = [s for s in sources if not is_held_out(s.module_path)][:max_files]
    heldout = [s for s in sources if is_held_out(s.module_path)]
    heldout = heldout[: None if max_files is None else max(1, max_files // 8)]
    tokenizer = train_tokenizer([s.text for s in train], TargetConfig().vocab_size)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out / "tokenizer")
    tokens = {"train": encode(tokenizer, train), "heldout": encode(tokenizer, heldout)}
    np.savez(out / "corpus.npz", **tokens)
    rows = heldout_prompts(tokenizer, heldout, prompts)
    (out / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(
        f"corpus: {len(train)} files, {len(tokens['train'])} tokens to train on; "
        f"{len(heldout)} files, {len(tokens['heldout'])} tokens held out; {len(rows)} prompts"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    build_corpus(args.stdlib, args.out)


if __name__ == "__main__":
    main()
