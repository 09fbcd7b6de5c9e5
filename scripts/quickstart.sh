#!/usr/bin/env bash
# Sets up, runs the jagged sweep (its small CPU scale where there is no GPU) and prints the report's path as the last line.
#
#   scripts/quickstart.sh [options of `python -m jfabench sweep`]

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"

set_up
exec "$venv/bin/python" -m jfabench sweep --config jagged.yaml "$@"
