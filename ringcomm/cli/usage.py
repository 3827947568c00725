# SPDX-License-Identifier: Apache-2.0
"""The parser of the commands, whose errors show short usage and suggest the word that was meant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NoReturn

__all__ = ["CommandParser", "suggestion"]


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns "; did you mean ...?" with the known word that is most like ``word``, or ""."""
    # Dashes are left out, since they would make all options similar.
    bare = {each.lstrip("-"): each for each in known}
    nearest = get_close_matches(word.lstrip("-"), bare, n=1)
    return f"; did you mean {bare[nearest[0]]}?" if nearest else ""


class CommandParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are short and suggest a known option or choice.

    ``parse_known_args()`` refuses unknown words too. argparse would return the unknown words of a
    subcommand to the main parser, whose error shows the usage of the wrong command.
    """

    suggest_on_error = False  # from Python 3.14 on, argparse also suggests choices

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name for name in self._option_string_actions if name.startswith("--")]
            guess = suggestion(unknown[0].partition("=")[0], options)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{guess}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            guess = suggestion(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{guess}") from None

    def error(self, message: str) -> NoReturn:
        """Prints the outline of the usage and the message in one write; exits with status 2."""
        words = [
            action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            for action in self._actions
            if not action.option_strings
        ]
        usage = " ".join(("usage:", self.prog, "[options]", *words))
        listed = f"       {self.prog} --help lists every option"
        # In one write, since the ranks of a launcher share stderr.
        sys.stderr.write(f"{usage}\n{listed}\n{self.prog}: error: {message}\n")
        sys.exit(2)
