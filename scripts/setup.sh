#!/bin/bash
# Make the Python environment of this checkout: setup.sh [dev]. Quiet when nothing is to be done.
# The stamp carries a hash of the requirements, so a changed pyproject.toml makes the next call install again.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-}
hash=$(cat pyproject.toml training/pyproject.toml scripts/setup.sh | sha256sum | cut -c1-12)
stamp=.venv/.setup-${extra:-base}-$hash
[ -e "$stamp" ] || [ -e ".venv/.setup-dev-$hash" ] && { mkdir -p .ansible; exit 0; }

say() { echo "mayfly: $*" >&2; }

fits() { command -v "$1" >/dev/null && "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=
for candidate in "${MAYFLY_PYTHON:-python3}" python3.13 python3.12 python3.11; do
  if fits "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "no Python >= 3.11 with venv found — install python3 and python3-venv, or set MAYFLY_PYTHON"; exit 2
  fi
  say "installing python3-venv from Debian packages"
  apt-get update -q >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends python3 python3-venv ca-certificates >&2
  python=python3
  fits "$python" || { say "$("$python" --version) is too old: Mayfly needs 3.11 — set MAYFLY_PYTHON"; exit 2; }
fi

start=$SECONDS
say "making the Python environment in .venv${extra:+ (with tools for $extra)}; this takes about a minute"
[ -x .venv/bin/python ] || "$python" -m venv .venv
log=.venv/setup.log
# Bytecode of everything would take longer than the rest.
if ! .venv/bin/pip install -q --no-compile --disable-pip-version-check -e training -e ".${extra:+[$extra]}" >"$log" 2>&1; then
  tail -n 15 "$log" >&2
  say "pip could not install the requirements (whole log: $log)"; exit 1
fi
# Of what every call of the command imports it is made here, also where PYTHONDONTWRITEBYTECODE keeps calls from making it.
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python - <<'PYTHON' || { say "the command mayfly cannot be imported"; exit 1; }
import importlib
import pkgutil

import mayfly

for module in pkgutil.walk_packages(mayfly.__path__, "mayfly."):
    if not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
PYTHON
# The working tree as an installed collection: roles are then named as users name them.
mkdir -p .ansible/collections/ansible_collections/mayfly
ln -sfn ../../../.. .ansible/collections/ansible_collections/mayfly/training
rm -f .venv/.setup-*; touch "$stamp"
say "environment ready after $((SECONDS - start)) s"
