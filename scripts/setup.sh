#!/usr/bin/env bash
# Makes a virtual environment and installs jfabench into it. Once everything is there, a run is quick and needs no network.
#
#   scripts/setup.sh [--dev] [--parquet] [--history] [--fa3] [--fa4]
#
#   --dev       what scripts/test.sh needs: pytest, ruff, mypy, ...
#   --parquet   sequence lengths from Parquet files
#   --history   comparing builds, the history of runs, the nightly run
#   --fa3       FlashAttention 3 (forward) as a provider
#   --fa4       FlashAttention 4 as a provider
#
# Environment:
#   PYTHON=python3.12    the interpreter to use (default: the first of version 3.11 to 3.14 on PATH)
#   VENV=DIR             the virtual environment (default: .venv in this repository; used as it is if it exists, so one
#                        made with --system-site-packages keeps the torch that is already installed)
#   JFABENCH_TORCH=...   cpu or cuda: that build of torch (default: cuda if there is an NVIDIA GPU, else cpu);
#                        or what to tell pip where torch is not yet installed, e.g. 'torch==2.11.0' or
#                        'torch==2.13.0 --index-url https://...'
#
# Other scripts source this file for `set_up`, `root` and `venv`.

set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
venv=${VENV:-$root/.venv}

fail() {
  echo "set-up: $1" >&2
  exit 1
}

supported() { # supported PYTHON
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2> /dev/null
}

find_python() {
  if [[ -n ${PYTHON:-} ]]; then
    supported "$PYTHON" || fail "PYTHON=$PYTHON is not a Python of version 3.11 to 3.14."
    echo "$PYTHON"
    return
  fi
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python3.14; do
    if supported "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python of version 3.11 to 3.14 on PATH; install one, or name it with PYTHON=/path/to/python3."
}

make_venv() {
  local python
  python=$(find_python)
  "$python" -c 'import venv, ensurepip' 2> /dev/null ||
    fail "$python cannot make virtual environments; install its venv module (Debian, Ubuntu: apt install python3-venv)."
  echo "set-up: making $venv with $("$python" --version)"
  "$python" -m venv "$venv"
}

set_up() { # set_up [--EXTRA ...]
  if [[ ! -e $venv ]]; then
    make_venv
  elif ! supported "$venv/bin/python"; then
    fail "$venv is there but has no working Python of version 3.11 to 3.14; remove it and run this again."
  fi
  "$venv/bin/python" "$root/scripts/install.py" "$@"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  set_up "$@"
fi
