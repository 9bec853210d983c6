#!/usr/bin/env bash
# Everything that needs a GPU, in one go and under 5 minutes: correctness, the device-pool machine for 60 s, figures.
#   benchmarks/gpu_check.sh [--dry-run] [OUT]      OUT: folder for logs and JSON (default: $OUT, or ./gpu_check)
# Needs torch, triton, hypothesis and pytest; kvledger itself need not be installed.
# --dry-run walks the same steps on a CPU, small; its figures are worthless.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
dry=; [ "${1:-}" = --dry-run ] && { dry=1; shift; }
out=${1:-${OUT:-gpu_check}}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD/benchmarks/.path:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRITON_DEFAULT_FP_FUSION=1
failed=0

# A bare machine has torch and triton but not kvledger: kvledger.kernels lies in src/kernels (see pyproject.toml).
if ! $python -c 'import kvledger.kernels' 2>/dev/null; then
    mkdir -p benchmarks/.path
    cp -r src/kvledger benchmarks/.path/ && cp -r src/kernels benchmarks/.path/kvledger/kernels
    trap 'rm -rf benchmarks/.path' EXIT
fi

step() {  # step NAME SECONDS COMMAND...
    local name=$1 limit=$2 began=$SECONDS; shift 2
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    local rc=$?
    printf '%-12s rc %d, %d s\n' "$name" "$rc" $((SECONDS - began))
    tail -n 40 "$out/$name.log"
    [ "$rc" -eq 0 ] || failed=1
}

if [ -n "$dry" ]; then
    device=cpu machine="--examples 5" bench=--dry-run only=cpu
    export OMP_NUM_THREADS=1
else
    device=cuda machine="--examples 10 --seconds 60" bench=--gpu only=cuda
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$out/device.txt"
fi
$python -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
# figures first: if a lease ends early, they are what cannot be had elsewhere
step figures 100 $python benchmarks/bench_kernels.py $bench --json "$out/figures.json"
# shellcheck disable=SC2086
step machine 110 $python -m tests.properties.device_machine $device $machine
# a process that has compiled nothing yet: the rest of tests/kernels interprets
step mla 60 $python -m pytest -q -p no:cacheprovider -k "$only" tests/kernels/test_mla_on_device.py
exit $failed
