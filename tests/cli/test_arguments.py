"""Flags: a user's mistake is exit code 2, a line that names the argument, and no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_fakes import write_model

from kdtree_runner import __version__
from kdtree_runner.cli.main import main, make_parser
from kdtree_runner.cli.verify import choose_modes


def parse(*flags: str):
    return make_parser().parse_args(["verify", "--model", "t", "--drafter", "d", *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tree-budget", "0"], r"--tree-budget: wanted an integer in \[1, 255\], got '0'"),
        (["--tree-budget", "8,256"], r"wanted an integer in \[1, 255\], got '256'"),
        (["--tree-budget", "8,,16"], "got ''"),
        (["--horizon", "33"], r"--horizon: wanted an integer in \[1, 32\], got '33'"),
        (["--max-tokens", "1"], "--max-tokens: wanted an integer in [2, 1000000000], got '1'"),
        (["--max-tokens", "1" + 21 * "0"], "--max-tokens: wanted an integer in [2, 1000000000]"),
        (["--seed", str(2**63)], f"--seed: wanted an integer in [0, {2**62}], got"),
        (["--temperature", "1e300"], "--temperature: wanted a number of at least 0 and at most 2"),
        (["--kv-cache-gib", "1e300"], "--kv-cache-gib: wanted a number above 0 and at most 1e+09"),
        (["--tree-args", 10**5 * "["], "--tree-args: wanted a JSON object"),
        (["--tree-args", '{"tree_budget": 3}'], "wanted --tree-budget in the place of"),
        (["--tree-args", '{"num-speculative-tokens": 3}'], "wanted --horizon in the place of"),
        (["--tree-args", '{"model": "d"}'], "wanted --drafter in the place of 'model'"),
        (["--max-tokens", "many"], "got 'many'"),
        (["--temperature", "-1"], "--temperature: wanted a number of at least 0 and at most 2"),
        (["--temperature", "nan"], "got 'nan'"),
        (["--temperature", "inf"], "got 'inf'"),
        (["--top-p", "0"], "--top-p: wanted a number above 0 and at most 1, got '0'"),
        (["--gpu-memory-utilization", "1.5"], "wanted a number above 0 and at most 1"),
        (["--executor", "slurm"], "--executor: invalid choice: 'slurm'"),
        (["--json", "/no/such/folder/x.json"], "--json: wanted a regular file in an existing"),
        (["--json", "/proc/x.json"], "--json: wanted a regular file in an existing directory that"),
        (["--json", "/dev/null"], "--json: wanted a regular file"),
        (["--json", 253 * "x"], "--json: wanted a regular file"),
        (["--bogus"], "unrecognized arguments: --bogus"),
    ],
)
def test_mistakes_in_flags(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*flags)
    assert stop.value.code == 2
    assert message.replace("\\", "") in capsys.readouterr().err


def test_a_link_stays_and_the_file_behind_it_is_written(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    assert parse("--json", str(link)).json == file
    assert sorted(tmp_path.iterdir()) == [link]  # nothing is left of the trial
    file.write_text("old")
    assert parse("--json", str(link)).json == file
    assert file.read_text() == "old"


def test_pipes_are_no_files_to_replace(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SystemExit):
        parse("--json", str(tmp_path / "pipe"))


@pytest.mark.parametrize("argv", [[], ["verify"], ["nonsense"]])
def test_missing_command_or_model(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2


def test_budgets_repeat_and_list_and_run_once_each() -> None:
    modes = choose_modes(parse("--tree-budget", "8,16", "--tree-budget", "16", "--control"))
    assert [mode.label for mode in modes] == ["tree 8", "tree 16", "control", "plain"]
    assert [mode.label for mode in choose_modes(parse())] == ["tree 16", "plain"]
    labels = [mode.label for mode in choose_modes(parse("--with-chain"))]
    assert labels == ["tree 16", "chain", "plain"]


@pytest.mark.parametrize("command", ["verify", "demo"])
def test_models_that_are_not_there(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_model(tmp_path / "target")
    absent, empty = str(tmp_path / "absent"), tmp_path / "empty"
    empty.mkdir()
    assert main([command, "--model", absent, "--drafter", target]) == 2
    assert "--model: wanted an existing model directory, or a hub name" in capsys.readouterr().err
    assert main([command, "--model", target, "--drafter", str(empty)]) == 2
    err = capsys.readouterr().err
    assert "--drafter: wanted a model directory with a config.json, got" in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    with pytest.raises(Exception, match="--model"):
        main(["verify", "--debug", "--model", absent, "--drafter", absent])


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"kdtree {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from kdtree_runner.cli.main import make_parser\n"
        "make_parser().format_help()\n"
        "print([m for m in ('torch', 'vllm', 'numpy', 'rich', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
