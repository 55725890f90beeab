"""The command `kdtree`: `demo`, `verify`, `doctor` and `bench ops`, `e2e`, `step`."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Sequence

from kdtree_runner import __version__
from kdtree_runner.cli import options
from kdtree_runner.cli.errors import CommandError, ExitCode
from kdtree_runner.config import UnsupportedError

# name -> (one line of help, flags). The command itself is kdtree_runner.cli.<name>.run, a blank as
# an underscore, imported when it is called: `kdtree --help` must not wait for torch.
COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "demo": ("watch plain, chain and DDTree decoding with the miniature pair", options.add_demo),
    "verify": ("prove that DDTree's output is the baseline's, token for token", options.add_verify),
    "doctor": ("say whether DDTree can run here, and if not, why", options.add_doctor),
    "bench ops": ("time the GPU's operators beside their peers", options.add_bench_ops),
    "bench e2e": (
        "plain, chain and DDTree on the same prompts, at every batch size",
        options.add_bench_e2e,
    ),
    "bench step": ("where the time of a decode step goes", options.add_bench_step),
}
GROUPS = {"bench": "measure"}  # first words of commands of two
EXIT_CODES = (
    "exit codes: 0 all is well; 1 the outputs differ (doctor: DDTree cannot run here); "
    "2 a user's mistake; 3 an engine or operator failed, or the check checked nothing; "
    "130 interrupted; 143 terminated"
)


def make_parser() -> argparse.ArgumentParser:
    """Every command and flag."""
    parser = argparse.ArgumentParser(
        prog="kdtree", description="DDTree speculative decoding in vLLM.", epilog=EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"kdtree {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    places = {"": commands}
    for group, summary in GROUPS.items():
        words = commands.add_parser(group, help=summary, description=summary, epilog=EXIT_CODES)
        places[group] = words.add_subparsers(required=True, metavar="WHAT")
    for name, (summary, add_flags) in COMMANDS.items():
        group, _, word = name.rpartition(" ")
        command = places[group].add_parser(
            word, help=summary, description=summary, epilog=EXIT_CODES
        )
        command.set_defaults(command=name)
        add_flags(command)
    return parser


def _terminated(number: int, frame: object) -> None:
    """End as by an error, so that engines and their logs go too."""
    print("kdtree: terminated", file=sys.stderr)
    sys.exit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminated)
    command = importlib.import_module(f"kdtree_runner.cli.{args.command.replace(' ', '_')}")
    try:
        return int(command.run(args))
    except KeyboardInterrupt:
        print("kdtree: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except (CommandError, UnsupportedError) as error:
        if args.debug:
            raise
        print(f"kdtree {args.command}: {error}", file=sys.stderr)
        return getattr(error, "exit_code", ExitCode.USER_MISTAKE)
    except Exception as error:
        if args.debug:
            raise
        kind = type(error).__name__
        print(f"kdtree {args.command}: {kind}: {error} (--debug shows where)", file=sys.stderr)
        return ExitCode.ENGINE_FAILURE


if __name__ == "__main__":
    sys.exit(main())
