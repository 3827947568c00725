# SPDX-License-Identifier: Apache-2.0
"""A build compiles the CUDA kernels for the machine's GPUs, or for the given targets.

Scripts replace the compiler and nvidia-smi; tests/proof/compile uses the real compiler.
"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import cmake
import ninja
import pytest

from ringcomm.cuda.units import PREBUILT, UNITS
from tests.support import ROOT

CMAKE = Path(cmake.CMAKE_BIN_DIR, "cmake")
EVERYTHING = [str(target) for target in PREBUILT]
# With these options CMake finds no program.
HIDDEN = ["-DCMAKE_FIND_ROOT_PATH=/nowhere", "-DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=ONLY"]

# This compiler accepts every architecture but sm_77, and writes its arguments to the output.
NVCC = """#!/bin/sh
case "$*" in
  *sm_77*) echo "nvcc fatal: unsupported architecture" >&2; exit 1 ;;
  *--dryrun*) exit 0 ;;
  *--version*) echo "release 13.0, V13.0.99"; exit 0 ;;
esac
words="$*"
while [ $# -gt 0 ]; do
  case "$1" in
    -o) product=$2 ;;
    -MF) needs=$2 ;;
  esac
  shift
done
echo "$words" > "$product"
echo "$product:" > "$needs"
"""


class Machine:
    """A build folder, with scripts in place of the machine's compiler and nvidia-smi."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.build = folder / "build"
        self.nvcc = self.script("nvcc", NVCC)
        # Finds the host's compiler first; HIDDEN would hide it in a test that runs alone.
        assert self.configure("-DRINGCOMM_CUDA=OFF") == []

    def script(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def shows(self, answer: str, status: int = 0) -> str:
        """Returns the option that names an nvidia-smi script with this answer."""
        wanted = '[ "$*" = "--query-gpu=compute_cap --format=csv,noheader" ] || exit 9'
        text = f"#!/bin/sh\n{wanted}\nprintf {shlex.quote(answer)}\nexit {status}\n"
        return f"-DRINGCOMM_NVIDIA_SMI={self.script('nvidia-smi', text)}"

    def cmake(self, *words: object) -> str:
        command = [str(word) for word in (CMAKE, *words)]
        done = subprocess.run(command, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def configure(self, *options: str) -> list[str]:
        """Configures the build, and returns its lines about the CUDA kernels."""
        names = [f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR, 'ninja')}", "-G", "Ninja"]
        names += [f"-DPython_EXECUTABLE={sys.executable}", "-DRINGCOMM_PYTHON=OFF"]
        # Forget the options of an earlier call.
        forget = ["-URINGCOMM_*", "-UCMAKE_FIND_*"]
        given = [f"-DRINGCOMM_NVCC={self.nvcc}", *options]
        said = self.cmake("-S", ROOT, "-B", self.build, *forget, *names, *given)
        lines = [line for line in said.splitlines() if "ringcomm:" in line]
        return [line.removeprefix("-- ringcomm: ") for line in lines]

    def chosen(self, *options: str) -> str:
        """Configures the build, and returns the single line about the CUDA kernels."""
        (line,) = self.configure(*options)
        return line

    def make(self) -> tuple[list[str], Path]:
        """Builds the kernels; returns the printed lines and the installed package's folder."""
        said = self.cmake("--build", self.build, "--target", "ringcomm_cuda").splitlines()
        prefix = self.folder / "prefix"
        shutil.rmtree(prefix, ignore_errors=True)
        self.cmake("--install", self.build, "--component", "kernels", "--prefix", prefix)
        return said, prefix / "ringcomm" / "_kernels"


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Machine(tmp_path_factory.mktemp("machine"))


@pytest.mark.parametrize(
    ("answer", "capabilities", "targets"),
    [
        ("8.9\\n", "8.9", "sm_80"),
        ("10.0\\n8.0\\n", "10.0, 8.0", "sm_80, sm_100a"),
        ("[N/A]\\n9.0\\n", "9.0", "sm_90a"),
    ],
)
def test_the_gpus_of_the_machine_are_compiled_for(machine, answer, capabilities, targets):
    said = machine.chosen(machine.shows(answer))
    assert said == (
        f"GPUs of compute capability {capabilities}: CUDA kernels by nvcc 13.0.99 for {targets}"
    )


def test_a_gpu_that_nothing_covers_is_left_to_the_first_use(machine):
    said = machine.chosen(machine.shows("7.5\\n"))
    assert said == (
        "GPUs of compute capability 7.5, nothing that nvcc makes: "
        "the CUDA kernels will be compiled at first use"
    )


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        ("No devices were found\\n", 0, "nvidia-smi shows no GPU"),
        ("", 9, "nvidia-smi failed (9)"),
        ("9.0\\n", 15, "nvidia-smi failed (15)"),
    ],
)
def test_without_a_gpu_nothing_is_compiled(machine, answer, status, why):
    said = machine.chosen(machine.shows(answer, status))
    assert said.startswith(f"{why}: the CUDA kernels will be compiled at first use; ")
    assert said.endswith("RINGCOMM_CUDA=all compiles them now, for every GPU")
    assert "ringcomm_cuda" not in machine.cmake("--build", machine.build, "--target", "help")


def test_an_nvidia_smi_that_hangs_is_given_up(machine):
    hangs = machine.script("nvidia-smi", "#!/bin/sh\nsleep 170\n")
    said = machine.chosen(f"-DRINGCOMM_NVIDIA_SMI={hangs}", "-DRINGCOMM_NVIDIA_SMI_LIMIT_S=1")
    assert said.startswith("nvidia-smi failed (Process terminated due to timeout): ")


def test_an_nvidia_smi_that_is_missing_is_no_gpu(machine):
    said = machine.chosen("-DRINGCOMM_NVIDIA_SMI=RINGCOMM_NVIDIA_SMI-NOTFOUND", *HIDDEN)
    assert said.startswith("no nvidia-smi: ")


def test_without_a_compiler_everything_is_left_to_the_first_use(machine):
    said = machine.chosen("-DRINGCOMM_NVCC=RINGCOMM_NVCC-NOTFOUND", *HIDDEN)
    assert said == "no nvcc: the CUDA kernels will be compiled at first use"
    with pytest.raises(AssertionError, match="RINGCOMM_CUDA=all, but there is no nvcc"):
        machine.configure("-DRINGCOMM_NVCC=RINGCOMM_NVCC-NOTFOUND", "-DRINGCOMM_CUDA=all", *HIDDEN)


@pytest.mark.parametrize(
    ("asked", "targets"),
    [("all", EVERYTHING), ("sm_90a;compute_100", ["sm_90a", "compute_100"])],
)
def test_what_is_asked_for_is_compiled_whatever_the_machine_has(machine, asked, targets):
    said = machine.chosen(machine.shows("8.0\\n"), f"-DRINGCOMM_CUDA={asked}")
    assert said == f"as asked: CUDA kernels by nvcc 13.0.99 for {', '.join(targets)}"
    lines, package = machine.make()
    # The build prints one line of progress per unit.
    for unit in UNITS:
        assert sum(line.endswith(f"Compiling the CUDA kernels of {unit}") for line in lines) == 1
    assert {path.stem for path in package.glob("*.fatbin")} == set(UNITS)
    assert json.loads((package / "units.json").read_text())["targets"] == targets
    command = (package / "move.fatbin").read_text()
    assert all(f"code={target}" in command for target in targets)
    assert command.count("-gencode") == len(targets)


@pytest.mark.parametrize("asked", ["ON", "sm90", "all;sm_80"])
def test_another_word_stops_the_build(machine, asked):
    # CMake may wrap the line at any space.
    wanted = " expected native, all, OFF, or targets such as".replace(" ", r"\s+")
    with pytest.raises(AssertionError, match=f"RINGCOMM_CUDA={asked}:{wanted}"):
        machine.configure(f"-DRINGCOMM_CUDA={asked}")


def test_a_target_that_the_compiler_does_not_know_stops_the_build(machine):
    # CMake may wrap the line anywhere, depending on the path's length.
    wanted = r"RINGCOMM_CUDA=sm_77:\s+\S*/nvcc\s+does\s+not\s+know\s+sm_77"
    with pytest.raises(AssertionError, match=wanted):
        machine.configure("-DRINGCOMM_CUDA=sm_77")
