#!/usr/bin/env bash
# Runs mypy over the packages as they are imported. An editable install maps the top-level folders into `jfabench` with an
# import hook, which mypy cannot see, so a tree of links shows it the same mapping.
#
#   scripts/typecheck.sh [mypy options]

set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
venv=$(realpath "${VENV:-$root/.venv}")
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

mkdir "$tree/jfabench"
ln -s "$root"/jfabench/* "$root"/{kernels,operators,reports,sweeps} "$tree/jfabench/"
ln -s "$root/scripts/install.py" "$tree/install.py"

# No cache: with one, mypy does not see a new module that an unchanged file imports.
cd "$tree"
"$venv/bin/mypy" --config-file "$root/pyproject.toml" --cache-dir /dev/null "$@" -p jfabench -m install |
  sed -E 's#^jfabench/(kernels|operators|reports|sweeps)/#\1/#; s#^install.py#scripts/install.py#'
