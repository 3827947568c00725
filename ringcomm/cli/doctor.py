"""``ringcomm doctor``: looks at the machine, tries two ranks, says what is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from ringcomm.cli import doctor_checks as checks
from ringcomm.cli.doctor_checks import FAIL, Finding
from ringcomm.cli.doctor_devices import check_devices

_SHMEM_SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-self-test", action="store_true", help="look only; do not start two ranks"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the findings; returns 1 when collectives cannot work here."""
    findings = list(examine())
    if any(finding.verdict == FAIL for finding in findings):
        findings.append(Finding("self-test", FAIL, "not tried", "first mend what failed above"))
    elif not args.no_self_test:
        findings.append(checks.check_self_test())
    print("\n".join(lines(findings)))
    failed = [finding.name for finding in findings if finding.verdict == FAIL]
    if failed:
        print(f"\ncollectives cannot work here: {', '.join(failed)}")
        return 1
    print("\ncollectives can work here")
    return 0


def examine() -> Iterable[Finding]:
    """All checks but the self-test; what needs the native module only where it loads."""
    yield from checks.check_versions()
    native = checks.check_native()
    yield native
    yield checks.check_cores()
    limit = checks.cgroup_limit_bytes(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup"))
    yield checks.check_memory(Path("/proc/meminfo").read_text(), limit)
    if Path("/dev/shm").exists():
        yield checks.check_shm("/dev/shm")
    yield checks.check_descriptor_paths()
    yield checks.check_single_copy()
    if native.verdict != FAIL:
        setting = _SHMEM_SETTING.read_text() if _SHMEM_SETTING.exists() else ""
        yield checks.check_heap(setting)
        yield from check_devices()


def lines(findings: Sequence[Finding]) -> list[str]:
    """The report, columns aligned; advice stands below its finding."""
    width = max(len(finding.name) for finding in findings)
    out = []
    for finding in findings:
        out.append(f"{finding.verdict:<4}  {finding.name:<{width}}  {finding.value}")
        if finding.advice:
            out.append(f"{'':<4}  {'':<{width}}  -> {finding.advice}")
    return out
