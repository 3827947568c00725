#!/bin/sh
# SPDX-License-Identifier: Apache-2.0

# Creates the virtual environment $1 with the first Python >= 3.10 that can build the project, or
# says what is missing. PYTHON=... selects an interpreter instead.
set -eu
venv=$1

fail() {
  printf 'set-up: %s\n' "$*" >&2
  exit 1
}

[ "$(uname -s)" = Linux ] || fail "ringcomm runs on Linux only (memfd, futex, /proc)."

supported='import sys; sys.exit(sys.version_info < (3, 10))'
can_make_venv='import ensurepip, venv'
has_headers='import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'

old='' no_venv='' no_headers='' chosen=''
for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10 python3.14}; do
  "$name" -c '' 2>/dev/null || continue
  if ! "$name" -c "$supported"; then
    old=$name
  elif ! "$name" -c "$can_make_venv" 2>/dev/null; then
    no_venv=$name
  elif ! "$name" -c "$has_headers"; then
    no_headers=$name
  else
    chosen=$name
    break
  fi
done

if [ -z "$chosen" ]; then
  [ -z "$no_venv" ] || fail "$no_venv cannot create virtual environments." \
    "Install its venv module (Debian, Ubuntu: apt-get install python3-venv)."
  [ -z "$no_headers" ] || fail "$no_headers has no C headers (Python.h)." \
    "Install them (Debian, Ubuntu: apt-get install python3-dev; Fedora: python3-devel)."
  [ -z "$old" ] || fail "$old is too old: Python 3.10 or newer is needed." \
    "Name another one with PYTHON=/path/to/python3."
  fail "no Python was found among: ${PYTHON:-python3 python3.10 ... python3.14}." \
    "Install Python 3.10 or newer, or name it with PYTHON=/path/to/python3."
fi

found=''
for compiler in ${CXX:-c++ g++ clang++}; do
  if command -v "$compiler" >/dev/null; then found=$compiler; break; fi
done
[ -n "$found" ] || fail "no C++ compiler was found." \
  "Install one (Debian, Ubuntu: apt-get install g++), or name it with CXX=..."

"$chosen" -m venv --clear "$venv"
echo "set-up: $venv uses $("$chosen" --version) ($chosen)"
