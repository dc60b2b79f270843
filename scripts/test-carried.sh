#!/usr/bin/env bash
# Runs the tests that scripts/carry-tests.sh packed, on a machine with a card and without cargo:
#
#   test-carried.sh [FILTER...]     those whose names hold a FILTER; all that have a body for cards otherwise
#
# CUDA's libraries are those of CUDA_HOME, or those that pip installed (PyTorch brings them along).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
gunzip -c "$here/trainer-tests.gz" > "$work/trainer-tests"
chmod +x "$work/trainer-tests"

folders=()
if [ -n "${CUDA_HOME:-}" ]; then
  folders+=("$CUDA_HOME/lib64" "$CUDA_HOME/lib")
fi
if packages=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))' 2> /dev/null); then
  folders+=("$packages"/nvidia/*/lib)
fi
# The driver's own is where the container's runtime puts it.
folders+=(/usr/local/cuda/lib64 /usr/local/nvidia/lib64)
LD_LIBRARY_PATH=$(IFS=:; echo "${folders[*]}")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH

missing=$(ldd "$work/trainer-tests" | sed -n 's/^\s*\(\S*\) => not found/\1/p')
if [ -n "$missing" ]; then
  echo "error: not found: $missing" | tr '\n' ' ' >&2
  echo >&2
  echo "hint: name the toolkit's folder in CUDA_HOME, or install PyTorch for CUDA with pip" >&2
  exit 2
fi
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null || true

if [ $# -eq 0 ]; then
  set -- layers:: kernels:: optim:: params::
fi
TRAINER_TEST_DEVICE=cuda "$work/trainer-tests" "$@"
