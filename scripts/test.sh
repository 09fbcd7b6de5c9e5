#!/usr/bin/env bash
# Sets up and runs every check: ruff, mypy and the tests.
#
#   scripts/test.sh [pytest options]     -n 0 runs the tests one after the other; by default two at a time

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"

set_up --dev
cd "$root"
"$venv/bin/ruff" check
"$venv/bin/ruff" format --check
scripts/typecheck.sh
"$venv/bin/python" -m pytest -n 2 --dist loadfile "$@"
