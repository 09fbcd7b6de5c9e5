#!/usr/bin/env bash
# Runs mypy over the packages as they are imported. An editable install maps the top-level folders into `jfabench` with an
# import hook, which mypy cannot see, so a tree of links shows it the same mapping.
#
#   scripts/typecheck.sh [mypy options]

set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$(realpath "${VENV:-$root/.venv}")
tree=$root/.mypy_cache/tree

rm -rf "$tree"
mkdir -p "$tree/jfabench"
ln -s "$root"/jfabench/* "$root"/{kernels,operators,reports,sweeps} "$tree/jfabench/"
ln -s "$root/scripts/install.py" "$tree/install.py"

cd "$tree"
"$venv/bin/mypy" --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" "$@" -p jfabench -m install |
  sed -E 's#^jfabench/(kernels|operators|reports|sweeps)/#\1/#; s#^install.py#scripts/install.py#'
