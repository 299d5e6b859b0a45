#!/bin/sh
# One run on a machine with a GPU: builds the library if it is not there, runs the kernel tests on the GPU, then the benchmarks.
# Figures go to $OUT (default build/gpu). Needs torch for CUDA, nvcc, pytest, attrs; no network.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root" || exit 1
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if ! ls quant_kernels/_C*.so >/dev/null 2>&1; then
  QUANT_KERNELS_CUDA_ARCHS=90 python3 setup.py build_ext --inplace >"$OUT/build.log" 2>&1 || { tail -20 "$OUT/build.log"; exit 1; }
fi
python3 -c "
import torch, quant_kernels.library as l
print(torch.__version__, torch.cuda.get_device_name(), 'native cuda', l.native_on('cuda'), 'cpu', l.cpu_isa())" || exit 1
timeout 200 python3 -m pytest -q -p no:cacheprovider -m gpu tests/kernels >"$OUT/tests.log" 2>&1
echo "tests: rc $?"; tail -15 "$OUT/tests.log"
timeout 150 python3 tests/benchmarks/bench_kernels.py --json "$OUT/kernels.json" 2>&1 | tee "$OUT/kernels.log"
timeout 120 python3 tests/benchmarks/bench_headline.py --json "$OUT/headline.json" 2>&1 | tee "$OUT/headline.log"
timeout 150 python3 tests/benchmarks/bench_linear.py --json "$OUT/linear.json" 2>&1 | tee "$OUT/linear.log"
