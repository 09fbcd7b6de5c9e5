#!/usr/bin/env bash
# The nightly run, the same on a self-hosted runner of GitHub, under cron, or by hand: sets up, measures, compares with the
# last good night of this machine, measures again what looks slower, and reports. Nothing in it needs GitHub.
#
#   scripts/nightly.sh [options of `python -m jfabench nightly`]
#
# Environment:
#   JFABENCH_HISTORY=URL   the database (default: an SQLite file in ~/.local/share/jfabench)
#   VENV, PYTHON           see setup.sh
#
# Exit codes: 0 good, 1 a regression, 4 wrong results, 3 the machine, its software or the database failed, 2 not valid.

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"

extras=(--history)
if compgen -G '/dev/nvidia[0-9]*' > /dev/null; then
  extras+=(--fa4) # what the kernels are compared with
fi
if ! (set_up "${extras[@]}"); then
  echo "nightly: set-up failed, so nothing was measured" >&2
  exit 3
fi
cd "$root"
data=${XDG_DATA_HOME:-${HOME:-/tmp}/.local/share}
export JFABENCH_HISTORY=${JFABENCH_HISTORY:-sqlite:///$data/jfabench/history.sqlite}
exec "$venv/bin/python" -m jfabench nightly --config nightly.yaml "$@"
