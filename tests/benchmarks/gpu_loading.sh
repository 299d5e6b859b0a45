#!/bin/sh
# One run of the loading part on a machine with a GPU: builds the library if it is not there, runs the GPU tests of
# tests/loading, then the benchmarks of models, streaming and ranks. Figures go to $OUT (default build/gpu).
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root" || exit 1
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if ! ls quant_kernels/_C*.so >/dev/null 2>&1; then
  QUANT_KERNELS_CUDA_ARCHS=90 python3 setup.py build_ext --inplace >"$OUT/build.log" 2>&1 || { tail -20 "$OUT/build.log"; exit 1; }
fi
timeout 150 python3 -m pytest -q -p no:cacheprovider -m gpu tests/loading >"$OUT/loading-tests.log" 2>&1
echo "tests: rc $?"; tail -40 "$OUT/loading-tests.log"
timeout 100 python3 tests/benchmarks/bench_model.py --json "$OUT/model.json"
timeout 100 python3 tests/benchmarks/bench_streaming.py --json "$OUT/streaming.json"
timeout 100 python3 tests/benchmarks/bench_streaming.py --pinned --json "$OUT/streaming-pinned.json"
timeout 300 python3 tests/benchmarks/bench_parallel.py --json "$OUT/parallel.json"
