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

    It refuses abbreviated options, since a misspelled option can be the beginning of another
    option. ``parse_known_args()`` refuses unknown words too. argparse would return the unknown
    words of a subcommand to the main parser, whose error shows the usage of the wrong command.
    """

    suggest_on_error = False  # from Python 3.14 on, argparse also suggests choices

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        # First, since the value of an unknown option can be a wrong positional argument.
        self._refuse_unknown(self._unknown_options(words))
        found, unknown = super().parse_known_args(words, namespace)
        self._refuse_unknown(unknown)
        return found, unknown

    def _unknown_options(self, words: Iterable[str]) -> list[str]:
        """Returns the unknown long options before ``--``, and before the name of a subcommand."""
        found: list[str] = []
        if "-" not in self.prefix_chars:
            return found
        for word in words:
            is_option = word.startswith("-")
            if word == "--" or (self._subparsers is not None and not is_option):
                break
            name = word.partition("=")[0]
            # argparse takes a word with a blank as an argument.
            if (
                word.startswith("--")
                and " " not in word
                and name not in self._option_string_actions
            ):
                found.append(word)
        return found

    def _refuse_unknown(self, words: list[str]) -> None:
        """Prints an error that names the words, with a suggestion for the first, if any."""
        if not words:
            return
        options = [name for name in self._option_string_actions if name.startswith("--")]
        guess = suggestion(words[0].partition("=")[0], options)
        self.error(f"unrecognized arguments: {' '.join(words)}{guess}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            guess = suggestion(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{guess}") from None

    def chosen(self, namespace: argparse.Namespace) -> CommandParser:
        """Returns the parser of the subcommand that the parsed words name, or this parser."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                name = getattr(namespace, action.dest, None)
                if name is not None:
                    found: CommandParser = action.choices[name]
                    return found.chosen(namespace)
        return self

    def error(self, message: str) -> NoReturn:
        """Prints the outline of the usage and the message; exits with status 2."""
        self.report(message)
        sys.exit(2)

    def report(self, message: str) -> None:
        """Prints the outline of the usage and the message in one write.

        A message of a library function begins with the name of a parameter. If an option has the
        same name, the printed message begins with the option.
        """
        name, colon, rest = message.partition(": ")
        option = f"--{name.replace('_', '-')}"
        if colon and option in self._option_string_actions:
            message = f"{option}: {rest}"
        words = [
            action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            for action in self._actions
            if not action.option_strings
        ]
        usage = " ".join(("usage:", self.prog, "[options]", *words))
        listed = f"       {self.prog} --help lists every option"
        # In one write, since the ranks of a launcher share stderr.
        sys.stderr.write(f"{usage}\n{listed}\n{self.prog}: error: {message}\n")
