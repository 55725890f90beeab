"""A check's grades, verdict, exit code and JSON, from fake engine runs."""

import json

import pytest
from cli_fakes import (
    CHAIN,
    CONTROL,
    DRAFTS,
    NO_DRAFTS,
    PLAIN,
    SAMPLING,
    SETTINGS,
    TOKENS,
    TREE,
    record,
    run,
)

from kdtree_runner.cli.report import Check, default_epsilon, tokens_per_step

OTHER = [TOKENS[0], [4, 5, 99, 98, 97]]  # differs from TOKENS at token 2 of prompt 1


def check(tree=TOKENS, gap=1.0, strict=False, chain=None, control=None, **changes) -> Check:
    return Check(
        SETTINGS,
        SAMPLING,
        strict,
        0.5,
        run(PLAIN, TOKENS, gap),
        [run(TREE, tree, None, **changes)],
        None if chain is None else run(CHAIN, chain, None),
        None if control is None else run(CONTROL, control, None),
    )


@pytest.mark.parametrize(
    ("tree", "gap", "strict", "verdict", "code"),
    [
        (TOKENS, 1.0, False, "equal", 0),
        (OTHER, 1.0, False, "divergent", 1),
        (OTHER, 0.1, False, "tie", 0),
        (OTHER, 0.1, True, "tie", 1),
        (OTHER, None, False, "divergent", 1),  # an unknown gap excuses nothing
        ([TOKENS[0], TOKENS[1][:3]], 0.1, False, "divergent", 1),  # ended early
    ],
)
def test_verdict(tree: list, gap: float | None, strict: bool, verdict: str, code: int) -> None:
    found = check(tree, gap, strict)
    assert (found.verdict, found.exit_code) == (verdict, code)


def test_one_bad_budget_of_two_is_enough() -> None:
    found = check()
    found = Check(
        SETTINGS,
        SAMPLING,
        False,
        0.5,
        found.baseline,
        [*found.trees, run(type(TREE)("tree", 8), OTHER)],
    )
    assert (found.verdict, found.exit_code) == ("divergent", 1)


def test_equal_output_without_a_draft_proves_nothing() -> None:
    found = check(acceptance=NO_DRAFTS)
    assert found.idle() == ["tree 16"]
    assert (found.verdict, found.exit_code) == ("nothing checked", 3)


def test_what_weakens_the_check_is_said() -> None:
    assert check().warnings() == []
    never = DRAFTS | {"num_accepted_tokens": 0}
    assert "no draft was ever accepted" in check(acceptance=never).warnings()[0]
    assert "other attention (KDTREE_MLA)" in check(attention=["CPU_MLA"]).warnings()[0]
    assert check(attention=[]).warnings() == []  # unknown: the ranks are in other processes


def test_chain_and_control_do_not_decide() -> None:
    found = check(chain=OTHER, control=OTHER)
    assert found.exit_code == 0
    assert found.comparisons["chain"].count("divergent") == 1
    assert found.comparisons["control"].noise_floor == 1.0


def test_json_has_every_figure() -> None:
    command = ["kdtree", "verify", "--strict"]
    report = json.loads(json.dumps(check(OTHER, 0.1, control=TOKENS).to_dict(command)))
    assert report["command"] == command
    assert {"python", "torch"} <= set(report["versions"])
    assert report["settings"]["model"] == "target"
    assert report["settings"]["max_tokens"] == 5
    assert report["settings"]["epsilon"] == 0.5
    assert (report["verdict"], report["exit_code"]) == ("tie", 0)
    assert list(report["modes"]) == ["plain", "control", "tree 16"]
    assert (report["modes"]["plain"]["batch_size"], report["modes"]["control"]["batch_size"]) == (
        8,
        1,
    )
    tree = report["modes"]["tree 16"]
    assert tree["budget"] == 16
    assert tree["num_tokens"] == 10
    assert tree["tokens_per_step"] == 2.0
    assert tree["tokens_per_second"] == 5.0
    assert tree["steps_per_second"] == 3.0
    assert tree["devices"] == ["some device"]
    assert tree["acceptance"]["num_drafts"] == 4
    assert report["comparisons"]["tree 16"]["tie"] == 1
    first, second = report["prompts"]
    assert first["num_prompt_tokens"] == 3
    assert first["runs"]["plain"]["token_ids"] == TOKENS[0]
    assert "grade" not in first["runs"]["plain"]
    assert first["runs"]["tree 16"]["grade"] == "equal"
    assert first["runs"]["tree 16"]["first_difference"] is None
    graded = second["runs"]["tree 16"]
    assert (graded["grade"], graded["first_difference"], graded["gap"]) == ("tie", 2, 0.1)


def test_tokens_per_step_leaves_the_prompts_own_token_out() -> None:
    assert tokens_per_step([record([1, 2, 3, 4, 5], 3)]) == 2.0
    assert tokens_per_step([record([1, 2, 3, 4, 5], 5)]) == 1.0
    assert tokens_per_step([record([1], 1)]) == 0.0
    assert tokens_per_step([]) == 0.0


def test_default_epsilon_grows_with_the_rounding() -> None:
    assert default_epsilon("float32") < default_epsilon("float16") < default_epsilon("bfloat16")
    assert default_epsilon("something new") == default_epsilon("bfloat16")
