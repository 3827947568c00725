"""Counts the errors in what compute-sanitizer says."""

from __future__ import annotations

import re
from dataclasses import dataclass

TOOLS = ("memcheck", "racecheck", "synccheck")
# Its own exit status for errors that it found; the cases themselves exit with 0 or 1.
ERROR_STATUS = 99

_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) errors?")
_HAZARDS = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warn")
_REFUSALS = ("Device not supported", "No attachable process found", "Unable to find injection")


@dataclass(frozen=True)
class Verdict:
    """``errors`` is None where the tool reached no summary; ``unavailable`` where it refused."""

    tool: str
    errors: int | None
    warnings: int = 0
    unavailable: bool = False
    detail: str = ""

    @property
    def clean(self) -> bool:
        return self.errors == 0


def read(tool: str, output: str, status: int | None) -> Verdict:
    """The verdict of one run of ``tool``; ``status`` is its exit status, None if it was stopped."""
    for refusal in _REFUSALS:
        if refusal in output:
            return Verdict(tool, None, unavailable=True, detail=refusal)
    hazards, errors = _HAZARDS.findall(output), _ERRORS.findall(output)
    if status is None:
        return Verdict(tool, None, detail="stopped at its limit")
    if not hazards and not errors:
        return Verdict(tool, None, detail="ended without a summary")
    # Racecheck closes with a summary of its own; there is one per process.
    counted = sum(map(int, errors)) + sum(int(found) for _, found, _ in hazards)
    warnings = sum(int(found) for _, _, found in hazards)
    if counted:
        return Verdict(tool, counted, warnings, detail=_first_finding(output))
    if status:
        return Verdict(tool, None, warnings, detail=f"the cases ended with exit status {status}")
    return Verdict(tool, 0, warnings)


def _first_finding(output: str) -> str:
    for line in output.splitlines():
        text = line.removeprefix("=========").strip()
        said = line.startswith("=========") and text
        if said and not text.startswith(("COMPUTE-SANITIZER", "ERROR SUMMARY")):
            return text
    return "see the log"
