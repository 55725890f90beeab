"""The committed miniature pair: what its card says is what the files hold."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "examples" / "tiny_kimi"
sys.path.insert(0, str(ROOT))  # the examples are not installed

from examples.tiny_kimi import config, data, evaluate, export, layers  # noqa: E402
from examples.tiny_kimi.drafter_model import Drafter  # noqa: E402
from examples.tiny_kimi.target_model import Router, Target  # noqa: E402

MAX_BYTES = 24_000_000
WEIGHTS = ("target/model.safetensors", "drafter/model.safetensors")


def card_files() -> dict[str, tuple[int, str]]:
    """{file: (bytes, sha256)} of the card's last table."""
    rows = re.findall(
        r"^\| `(\S+)` \| (\d+) \| `(\w{64})` \|$", (PAIR / "README.md").read_text(), re.M
    )
    return {name: (int(size), digest) for name, size, digest in rows}


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(PAIR / "target")


@pytest.fixture(scope="module")
def heldout() -> list[dict[str, str]]:
    return [json.loads(line) for line in (PAIR / "heldout.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Drafter]:
    return export.load_target(PAIR / "target"), export.load_drafter(PAIR / "drafter")


@pytest.mark.parametrize("name", [*WEIGHTS, "target/tokenizer.json"])
def test_card_has_the_size_and_digest_of_each_file(name: str) -> None:
    path = PAIR / name
    assert card_files()[name] == (path.stat().st_size, export.sha256(path))


def test_pair_is_small() -> None:
    files = [p for folder in ("target", "drafter") for p in (PAIR / folder).iterdir()]
    assert sum(p.stat().st_size for p in files) <= MAX_BYTES


def test_configs_are_those_of_the_code() -> None:
    target, drafter = config.TargetConfig(), config.DrafterConfig()
    assert json.loads((PAIR / "target" / "config.json").read_text()) == target.hf()
    assert json.loads((PAIR / "drafter" / "config.json").read_text()) == drafter.hf(target)


def test_geometry_is_kimis() -> None:
    hf = config.TargetConfig().hf()
    assert (hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]) == (128, 64, 128)
    assert (hf["kv_lora_rank"], hf["first_k_dense_replace"], hf["n_group"]) == (512, 1, 1)
    assert (hf["scoring_func"], hf["topk_method"]) == ("sigmoid", "noaux_tc")
    assert hf["num_attention_heads"] % 2 == config.DrafterConfig().num_kv_heads % 2 == 0
    assert config.DrafterConfig().horizon == 7


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_bfloat16_but_for_the_router_bias(name: str) -> None:
    with safe_open(PAIR / name, "pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
            wanted = torch.float32 if key.endswith("score_correction_bias") else torch.bfloat16
            assert tensors.get_tensor(key).dtype == wanted, key


def test_drafter_shares_embedding_and_head() -> None:
    with safe_open(PAIR / WEIGHTS[1], "pt") as tensors:
        assert not [key for key in tensors.keys() if "embed" in key or "lm_head" in key]  # noqa: SIM118


def test_tokenizer_round_trip(tokenizer) -> None:
    text = 'def f(x: int) -> str:\n\treturn f"{x:>8}" + "é ∑ 日本"  # ok\r\n'
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < config.TargetConfig().vocab_size == len(tokenizer)


def test_special_tokens(tokenizer) -> None:
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (*ids, tokenizer.mask_token_id) == (0, 1, 2, 3)


def test_chat_template(tokenizer) -> None:
    messages = [{"role": "user", "content": "sort a list"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "# user: sort a list\n# assistant:"


def test_prompts_are_from_held_out_files(heldout) -> None:
    assert len({row["prompt"] for row in heldout}) == len(heldout) >= 160
    assert all(data.is_held_out(row["source"]) for row in heldout)


def test_prompts_vary_in_length(heldout, tokenizer) -> None:
    lengths = sorted(len(tokenizer(row["prompt"]).input_ids) for row in heldout)
    assert lengths[0] >= 20
    assert lengths[-1] <= 400
    assert lengths[len(lengths) // 10] < 40
    assert lengths[-len(lengths) // 10] > 200


def test_held_out_rule_is_stable_and_rare() -> None:
    assert data.is_held_out("__future__.py")
    assert not data.is_held_out("json/decoder.py")
    share = sum(data.is_held_out(f"{i}.py") for i in range(4096)) / 4096
    assert 0.5 / data.HELDOUT_ONE_IN < share < 2 / data.HELDOUT_ONE_IN


def test_yarn_amplitude_is_one_and_slow_dimensions_are_slowed() -> None:
    yarn = config.Yarn()
    cos, sin = layers.yarn_tables(yarn, 128)
    assert cos.shape == (4096, 64)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))
    slowest = yarn.theta ** -(126 / 128) / yarn.factor
    assert sin[1000, -1].item() == pytest.approx(1000 * slowest, rel=1e-3)


def test_router_picks_by_bias_and_weighs_without_it() -> None:
    router = Router(config.TargetConfig()).eval()
    with torch.no_grad():
        router.weight.zero_()
        router.e_score_correction_bias[[2, 5]] = 1.0
    weights = router(torch.randn(3, 256))
    assert weights.nonzero()[:, 1].tolist() == [2, 5] * 3
    torch.testing.assert_close(weights.sum(-1), torch.full((3,), 2.827))


def test_target_and_drafter_agree_on_held_out_code(pair, heldout, tokenizer) -> None:
    """A few steps of real decoding: far above the 1 token a step of a useless drafter."""
    prompts = [tokenizer(row["prompt"]).input_ids for row in heldout[:40]]
    short = sorted(prompts, key=len)[:6]
    with torch.no_grad():
        acceptance = evaluate.measure(*pair, short, num_tokens=24, budgets=(16,))
    assert acceptance.chain > 2.0
    assert acceptance.by_budget[16] >= acceptance.chain


def test_every_expert_is_used(pair, heldout, tokenizer) -> None:
    target = pair[0]
    ids = [i for row in heldout[:24] for i in tokenizer(row["prompt"]).input_ids][:1024]
    target.train()  # routers count their choices only in training
    with torch.no_grad():
        target(torch.tensor([ids]))
    target.eval()
    assert all(int(router.load.min()) > 0 for router in target.routers())


def test_tree_holds_more_than_the_chain() -> None:
    logp = torch.tensor([[0.6, 0.4], [0.9, 0.1]]).log().tolist()
    tokens = [[10, 11], [20, 21]]
    assert evaluate.tree_depth(logp, tokens, [11, 20], n=2) == 0  # the chain: 10, 10 20
    assert evaluate.tree_depth(logp, tokens, [11, 20], n=3) == 1
    assert evaluate.tree_depth(logp, tokens, [11, 20], n=4) == 2


def test_smoke_training(tmp_path: Path) -> None:
    """The whole script, a few steps of each part, in a process of its own."""
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "examples.tiny_kimi.train", "--smoke", "--device", "cpu"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # threads only wait for one another here
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for name in WEIGHTS:
        assert (tmp_path / name).stat().st_size == (PAIR / name).stat().st_size
    assert "tokens/step" in done.stdout
