#!/usr/bin/env bash
# Sets up and runs every check: ruff, mypy and the tests.
#
#   scripts/test.sh [pytest options]

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"

set_up --dev
cd "$root"
"$venv/bin/ruff" check
"$venv/bin/ruff" format --check
scripts/typecheck.sh
"$venv/bin/python" -m pytest "$@"
