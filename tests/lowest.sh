#!/usr/bin/env bash
# tests/lowest.sh --extra NAME … -- FILE …: installs the lowest versions that pyproject.toml allows of what dispatches into an
# environment of its own, and runs these tests there.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=()
while [ "$1" != -- ]; do extras+=("$1") && shift; done
shift
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
command -v uv > /dev/null || { python3 -m venv "$scratch/uv" && "$scratch/uv/bin/pip" install -q uv && PATH=$scratch/uv/bin:$PATH; }
uv venv -q --python python3 "$scratch/venv"
export VIRTUAL_ENV=$scratch/venv PYTHONDONTWRITEBYTECODE=1
uv pip install -q --resolution lowest-direct -r pyproject.toml "${extras[@]}"
uv pip freeze | tee "$scratch/lowest.txt"
uv pip install -q --constraints "$scratch/lowest.txt" 'pytest>=8.0' 'pytest-xdist>=3.7' 'hypothesis>=6.100' \
  'kubernetes-validate>=1.30' 'jsonschema>=4.20' packaging
"$scratch/venv/bin/python" -m pytest -q -n 2 --dist loadscope -p no:cacheprovider -m 'not containers' "$@"
