# SPDX-License-Identifier: Apache-2.0
"""Unpacks Debian packages of another architecture into a folder, without root rights.

apt-get downloads the packages with its own state, so the architectures and packages of this system
stay as they are. Maintainer scripts do not run, which Python under qemu does not need.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.commands import run

ARCHITECTURE = "arm64"
# apt-get adds the packages that these depend on, such as libc6.
PACKAGES = ("python3",)
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def system_of(os_release: str) -> tuple[str, str]:
    """Returns ID and codename of a system, such as ("debian", "bookworm"), from its os-release."""
    pairs = (line.partition("=")[::2] for line in os_release.splitlines())
    values = {name: value.strip('"') for name, value in pairs}
    return values.get("ID", ""), values.get("VERSION_CODENAME", "")


def mirror_in(listed: str, codename: str) -> str:
    """Returns the mirror of a release, from lines of apt-get: address, release, component.

    Raises:
        SystemExit: no line has the release.
    """
    for line in listed.splitlines():
        address, release, component = line.split("|")
        if (release, component) == (codename, "main"):
            return address
    raise SystemExit(f"aarch64: apt-get has no source of {codename}/main: add one, or pass --root")


def source_of_this_system() -> str:
    """Returns the entry of an apt source: packages of ``ARCHITECTURE`` for this Debian release.

    Raises:
        SystemExit: this system is not Debian, or lacks the release's mirror or its keys.
    """
    os_release = Path("/etc/os-release")
    name, codename = system_of(os_release.read_text() if os_release.exists() else "")
    if name != "debian" or shutil.which("apt-get") is None or not KEYRING.exists():
        raise SystemExit(
            f"aarch64: needs Debian with apt-get and {KEYRING} (debian-archive-keyring); elsewhere "
            "pass --root with the root folder of a Linux for AArch64 that has Python"
        )
    columns = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)"
    listed = run("apt-get", "indextargets", "--format", columns, "Created-By: Packages")
    return (
        f"Types: deb\nURIs: {mirror_in(listed, codename)}\nSuites: {codename}\nComponents: main\n"
        f"Architectures: {ARCHITECTURE}\nSigned-By: {KEYRING}\n"
    )


def write_settings(folder: Path, source: str) -> Path:
    """Writes an apt configuration whose state, cache and sources are in ``folder``."""
    for each in ("state/lists/partial", "cache/archives/partial"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    (folder / "debian.sources").write_text(source)
    settings = folder / "apt.conf"
    settings.write_text(
        f'Dir::State "{folder}/state";\nDir::State::status "{folder}/status";\n'
        f'Dir::Cache "{folder}/cache";\nDir::Etc::sourcelist "{folder}/debian.sources";\n'
        'Dir::Etc::sourceparts "/dev/null";\n'
        f'APT::Architecture "{ARCHITECTURE}";\nAPT::Architectures {{ "{ARCHITECTURE}"; }};\n'
        'APT::Install-Recommends "false";\n'
    )
    return settings


def make_root(root: Path) -> Path:
    """Fills ``root`` with the files of the packages, unless an earlier call did; returns it."""
    done = root / ".unpacked"
    wanted = " ".join(PACKAGES)
    if done.exists() and done.read_text() == wanted:
        return root
    folder = root.with_name(f"{root.name}-apt")
    for old in (root, folder):
        shutil.rmtree(old, ignore_errors=True)
    settings = str(write_settings(folder, source_of_this_system()))
    run("apt-get", "--quiet", "update", APT_CONFIG=settings)
    install = ("apt-get", "--quiet", "--yes", "--download-only", "install")
    run(*install, *PACKAGES, APT_CONFIG=settings)
    for package in sorted((folder / "cache" / "archives").glob("*.deb")):
        run("dpkg-deb", "--extract", package, root)
    done.write_text(wanted)
    return root
