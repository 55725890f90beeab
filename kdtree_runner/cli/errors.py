"""What a command can fail of, and the exit code that says so."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """0 is returned only when everything that was asked for was checked and holds."""

    OK = 0
    DIVERGED = 1  # the outputs differ; of `doctor`: DDTree cannot run here
    USER_MISTAKE = 2  # as argparse
    ENGINE_FAILURE = 3  # an engine crashed or hung, or the check checked nothing
    INTERRUPTED = 130  # as shells report Ctrl-C


class CommandError(Exception):
    """An error whose message is for the user: shown without a traceback unless --debug is given."""

    exit_code = ExitCode.ENGINE_FAILURE


class UserError(CommandError):
    """A user's mistake: the message names the argument, what was wanted and what came."""

    exit_code = ExitCode.USER_MISTAKE


class EngineError(CommandError):
    """An engine refused to start, crashed, fell silent, or did not do what it was asked to."""


class Refused(Exception):
    """In an engine's process: the job itself is wrong, the user's mistake and not the engine's."""


def wanted(argument: str, what: str, got: object) -> UserError:
    """The message that every mistake in an argument has."""
    return UserError(f"{argument}: wanted {what}, got {got!r}")
