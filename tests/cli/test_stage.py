"""The demo's screen on a terminal: the growing text, the tree of the moment, the best tree."""

import io

from cli_fakes import PLAIN, TREE
from rich.console import Console

from kdtree_runner.cli.stage import Stage


def make_stage() -> Stage:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    return Stage([PLAIN, TREE], prompts=["import os\n", "x"], console=console)


def shown(stage: Stage) -> str:
    with stage.console.capture() as capture:
        stage.console.print(stage.screen())
    return capture.get()


def step(index: int, text: str, num_tokens: int) -> dict:
    return {"event": "step", "index": index, "text": text, "num_tokens": num_tokens, "seconds": 2.0}


def tree(number: int, path: list[int], num_emitted: int) -> dict:
    return {
        "event": "tree",
        "step": number,
        "texts": ["a", "b", "c", "d"],
        "parents": [-1, 0, 0, 2],
        "path": path,
        "num_emitted": num_emitted,
    }


def test_text_grows_and_restarts_with_each_prompt() -> None:
    stage = make_stage()
    show = stage.begin(TREE)
    show(step(0, "def f", 2))
    show(step(0, "(x):", 3))
    screen = shown(stage)
    assert "import os" in screen
    assert "def f(x):" in screen
    assert "prompt 1 of 2" in screen
    assert "5 tokens in 2 steps, 2.5 tok/s" in screen
    show(step(1, "class", 1))
    screen = shown(stage)
    assert "def f" not in screen
    assert "prompt 2 of 2" in screen
    assert stage.tree_steps == ["def f", "(x):"]


def test_only_the_last_lines_are_shown() -> None:
    stage = make_stage()
    stage.begin(PLAIN)(step(0, "".join(f"line {i}\n" for i in range(50)), 9))
    screen = shown(stage)
    assert "line 49" in screen
    assert "line 3\n" not in screen


def test_the_longest_path_is_kept_and_one_off_the_first_nodes_preferred() -> None:
    stage = make_stage()
    show = stage.begin(TREE)
    show(tree(1, [0, 1, 1], 2))
    show(tree(2, [0, 2, 2], 2))
    assert stage.best_tree is not None
    assert stage.best_tree["step"] == 2
    show(tree(3, [0, 2, 3], 3))
    show(tree(4, [0, 0, 0], 1))
    assert stage.best_tree["step"] == 3
    assert "draft tree of step 4: 0 of 3 nodes accepted, 1 tokens emitted" in shown(stage)
