"""The demo's screen: the text as it grows, the draft tree of the moment, and the outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from kdtree_runner.cli.engine import Mode
from kdtree_runner.cli.render import conditions, run_table
from kdtree_runner.cli.report import Check
from kdtree_runner.spec_decode.checker import Summary

if TYPE_CHECKING:
    from typing_extensions import Self

STEP_STYLES = ("bold cyan", "bold magenta")  # alternate, so that one sees what one step emitted
PROMPT_STYLE = "dim"
PROMPT_LINES = 4  # last lines of the prompt before the text that remains on the screen
TEXT_LINES = 14  # last lines of the growing text that are shown
STEP_MARK = "▏"  # ends a step in plain output
TITLES = {
    "plain": "plain decoding: one token a step",
    "chain": "chain: vLLM's DFlash, one guess a position",
    "tree": "DDTree: the most probable guesses, as a tree",
}


class Stage:
    """Shows what the engines of the demo report; keeps the tree worth showing at the end."""

    def __init__(
        self,
        modes: Sequence[Mode],
        prompts: Sequence[str],
        console: Console | None = None,
    ) -> None:
        self.console = console or Console()
        self.prompts = prompts
        self.lines: dict[str, str] = {mode.label: "waiting" for mode in modes}
        self.mode = modes[0]
        self.text, self.index = Text(), 0
        self.num_steps = self.num_tokens = 0
        self.tree: dict[str, Any] | None = None
        self.best_tree: dict[str, Any] | None = None
        self.tree_steps: list[str] = []  # of prompt 0: what each step of DDTree emitted
        self.live = Live(console=self.console, refresh_per_second=10, transient=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.live.stop()

    def begin(self, mode: Mode) -> Callable[[dict[str, Any]], None]:
        """The next engine; returns what its events are to be handed to."""
        self.mode, self.text, self.tree = mode, Text(), None
        self.index = self.num_steps = self.num_tokens = 0
        return self.show

    def show(self, event: dict[str, Any]) -> None:
        """Take in one event of the engine that runs."""
        kind = event["event"]
        if kind == "phase":
            self.lines[self.mode.label] = event["name"]
        elif kind == "step":
            self._add_step(event)
        elif kind == "tree":
            self.tree = event
            if _worth(event) > _worth(self.best_tree):
                self.best_tree = event
        elif kind == "result" and not self.console.is_terminal:
            self.console.print(f"{self.mode.label}: {self.lines[self.mode.label]}", highlight=False)
        if self.console.is_terminal:
            self.live.update(self.screen())

    def _add_step(self, event: dict[str, Any]) -> None:
        if event["index"] != self.index:
            self.index, self.text = event["index"], Text()
        self.text.append(event["text"], STEP_STYLES[self.num_steps % 2])
        if self.mode.kind == "tree" and event["index"] == 0:
            self.tree_steps.append(event["text"])
        self.num_steps += 1
        self.num_tokens += event["num_tokens"]
        seconds = max(event["seconds"], 1e-9)
        self.lines[self.mode.label] = (
            f"{self.num_tokens} tokens in {self.num_steps} steps, "
            f"{self.num_tokens / seconds:.1f} tok/s"
        )

    def screen(self) -> RenderableType:
        """Everything that is to be seen now."""
        status = Text()
        for label, line in self.lines.items():
            style = "bold" if label == self.mode.label else "dim"
            status.append(f"{label:>10}  {line}\n", style)
        text = Text.assemble((self.prompts[self.index], PROMPT_STYLE), self.text)
        shown = Text("\n").join(text.split("\n", allow_blank=True)[-TEXT_LINES:])
        title = f"{TITLES[self.mode.kind]} (prompt {self.index + 1} of {len(self.prompts)})"
        parts: list[RenderableType] = [status, Panel(shown, title=title, title_align="left")]
        if self.tree is not None:
            parts.append(tree_panel(self.tree))
        return Group(*parts)


def _worth(tree: dict[str, Any] | None) -> tuple[int, int]:
    """How good an example a tree is: its path is long, and is not simply the first nodes."""
    if tree is None:
        return (0, 0)
    nodes = tree["path"][: tree["num_emitted"]]
    return (len(nodes), int(nodes != sorted(range(len(nodes)))))


def tree_panel(tree: dict[str, Any]) -> Panel:
    """One draft tree, its accepted path marked."""
    from kdtree_runner.spec_decode.tree import draw_tree

    path = tree["path"][: tree["num_emitted"]]
    drawing = Text()
    for line in draw_tree(tree["texts"], tree["parents"], path).split("\n"):
        drawing.append(line + "\n", "bold green" if line.endswith("✓") else "dim")
    drawing.rstrip()
    title = f"draft tree of step {tree['step']}: {len(path) - 1} of "
    title += f"{len(tree['parents']) - 1} nodes accepted, {tree['num_emitted']} tokens emitted"
    return Panel(drawing, title=title, title_align="left")


def show_outcome(check: Check, stage: Stage) -> None:
    """What remains on the screen: a text, a tree, the table, and whether all texts are the same."""
    console, tree = stage.console, stage.best_tree
    title = "prompt 1, as DDTree continued it, a colour a step"
    if not console.is_terminal:
        title = f"prompt 1, as DDTree continued it, {STEP_MARK} after each step"
    text = Text("\n".join(stage.prompts[0].split("\n")[-PROMPT_LINES:]), PROMPT_STYLE)
    text.append_text(steps_text(stage.tree_steps, marked=not console.is_terminal))
    console.print(Panel(text, title=title, title_align="left"))
    if tree is not None:
        console.print(tree_panel(tree))
    console.print(run_table(check.runs, check.comparisons))
    console.print(conditions(check), style="dim", highlight=False)
    for warning in check.warnings():
        console.print(f"warning: {warning}", style="yellow", highlight=False)
    tree_run = check.trees[0]
    console.print(
        closing(tree_run.num_tokens, check.comparisons[tree_run.mode.label]), highlight=False
    )


def steps_text(steps: Sequence[str], marked: bool) -> Text:
    """A text that shows what each step emitted."""
    text = Text()
    for i, step in enumerate(steps):
        body = step.rstrip("\n")  # the mark stands before the line ends, not on a line of its own
        mark = STEP_MARK if marked else ""
        text.append(body + mark + step[len(body) :], STEP_STYLES[i % 2])
    return text


def closing(num_tokens: int, tree: Summary) -> str:
    """The last line. num_tokens: of all prompts."""
    total = len(tree.comparisons)
    if tree.count("equal") == total:
        same = f"DDTree gave plain decoding's {num_tokens} tokens on {total} prompts"
        return f"[bold green]EQUAL[/]: {same}, one by one the same."
    differ = f"DDTree's tokens differ on {total - tree.count('equal')} of {total} prompts"
    return f"[bold red]NOT EQUAL[/]: {differ}; `kdtree verify` tells ties from divergences."
