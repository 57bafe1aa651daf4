#!/usr/bin/env bash
# The tests that touch ArviZ, under every Python >= 3.11 that is found: 3.11 gets ArviZ 0.23, later ones ArviZ 1.
set -euo pipefail
cd "$(dirname "$0")/.."
for python in $(ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[1-9]*/bin/python 2>/dev/null || true) $(command -v python3.11 python3.12 python3.13 python3.14 || true); do
    name=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || continue
    [ -e ".venv-$name/.done" ] && continue  # the same interpreter by another path
    [ -d ".venv-$name" ] || { "$python" -m venv ".venv-$name" && ".venv-$name/bin/pip" install --quiet --disable-pip-version-check -e '.[test]'; }
    ".venv-$name/bin/python" -c 'import sys, arviz, jax; print("Python", sys.version.split()[0], "ArviZ", arviz.__version__, "JAX", jax.__version__)'
    ".venv-$name/bin/python" -m pytest tests/test_diagnostics.py --quiet -k "arviz or from_numpyro or predictions or exact_score"
    touch ".venv-$name/.done"
done
rm -f .venv-3.*/.done
