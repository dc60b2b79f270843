#!/usr/bin/env bash
# Runs what scripts/carry-tests.sh packed, on a machine with a GPU and without cargo:
#
#   test-carried.sh [FILTER...]       unit tests whose names contain a FILTER; by default all with a GPU implementation
#   test-carried.sh random [SEEDS]    random jobs of these seeds, 0..300 by default; failing jobs and the table stay in
#                                     TRAINER_TRIALS_FOLDER, ./trials by default. docs/contributing.md lists the other
#                                     variables
#
# CUDA's libraries come from CUDA_HOME, or from pip's packages (PyTorch installs them).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unpack() {
  gunzip -c "$here/$1.gz" > "$work/$1"
  chmod +x "$work/$1"
}

folders=()
if [ -n "${CUDA_HOME:-}" ]; then
  folders+=("$CUDA_HOME/lib64" "$CUDA_HOME/lib")
fi
if packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))' 2> /dev/null); then
  folders+=("$packages"/nvidia/*/lib)
fi
# The container runtime puts the driver's library here.
folders+=(/usr/local/cuda/lib64 /usr/local/nvidia/lib64)
LD_LIBRARY_PATH=$(IFS=:; echo "${folders[*]}")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH

wanted=(trainer-engine-tests trainer-tests)
if [ "${1:-}" = random ]; then
  wanted=(trainer)
fi
for program in "${wanted[@]}"; do
  unpack "$program"
done
missing=$(ldd "$work/$program" | sed -n 's/^\s*\(\S*\) => not found/\1/p')
if [ -n "$missing" ]; then
  echo "error: not found: $missing" | tr '\n' ' ' >&2
  echo >&2
  echo "hint: name the toolkit's folder in CUDA_HOME, or install PyTorch for CUDA with pip" >&2
  exit 2
fi
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null || true

export TRAINER_TEST_DEVICE=cuda
if [ "$program" = trainer ]; then
  unpack integration-tests
  export TRAINER_BINARY=$work/trainer TRAINER_TRIALS_SEEDS=${2:-0..300}
  export TRAINER_TRIALS_FOLDER=${TRAINER_TRIALS_FOLDER:-$PWD/trials} TRAINER_TRIALS_PARALLEL=${TRAINER_TRIALS_PARALLEL:-5}
  export TRAINER_TRIALS_SECONDS=${TRAINER_TRIALS_SECONDS:-1200} TRAINER_TRIALS_RUN_SECONDS=${TRAINER_TRIALS_RUN_SECONDS:-120}
  "$work/integration-tests" random::trials --exact --ignored --nocapture
  exit
fi
if [ $# -eq 0 ]; then
  set -- layers:: graph:: kernels:: optim:: param memory::gpu
fi
for program in "${wanted[@]}"; do
  "$work/$program" "$@"
done
