#!/bin/sh
# Tests the rooms that need no torch on every other CPython that this machine has: `sh tests/other_pythons.sh DIRS...`.
# Each gets an environment of its own; one that is not there is skipped by name.
set -eu
cd "$(dirname "$0")/.."
mine=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for version in 3.11 3.12 3.13 3.14; do
  [ "$version" = "$mine" ] && continue
  found=
  for one in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
    if "$one" -c 'import ensurepip, ssl, venv' 2>/dev/null; then found=$one; break; fi
  done
  if [ -z "$found" ]; then echo "skipped: no Python $version on this machine"; continue; fi
  home=.venv-pythons/$version
  if [ ! -f "$home/.ready" ] || [ pyproject.toml -nt "$home/.ready" ]; then
    "$found" -m venv "$home"
    "$home/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt \
      pytest hypothesis jsonschema '.[traces]'
    touch "$home/.ready"
  else  # only the code has changed
    "$home/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --no-deps --force-reinstall .
  fi
  echo "Python $version: $*"
  MESHWRIGHT_SHARES=off "$home/bin/python" -m pytest -q -p no:cacheprovider "$@"
done
