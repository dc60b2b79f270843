#!/usr/bin/env bash
# Runs a command with the CUDA toolkit that `just cuda-toolkit` fetched, or with the installed one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -f target/cuda-toolkit/env ]; then
  source target/cuda-toolkit/env
fi
exec "$@"
