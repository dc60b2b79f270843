#!/usr/bin/env bash
# Fetches CUDA's compiler and libraries from PyPI, to build with `--features cuda` without root and without a GPU.
# Everything goes into the given folder (target/cuda-toolkit by default); source its `env` before a build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath -m "${1:-target/cuda-toolkit}")
cuda=13.0

if [ ! -x "$folder/venv/bin/pip" ]; then
  python3 -m venv "$folder/venv"
fi
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  "nvidia-cuda-nvcc==$cuda.*" "nvidia-cuda-crt==$cuda.*" "nvidia-cuda-runtime==$cuda.*" "nvidia-nvvm==$cuda.*" \
  "nvidia-cuda-nvrtc==$cuda.*" "nvidia-cublas==$cuda.*" nvidia-cuda-cccl "nvidia-curand==10.4.0.35" \
  nvidia-cudnn-cu13 nvidia-cudnn-frontend
packages=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
home=$packages/nvidia/cu${cuda%%.*}

# The wheels contain only libX.so.N; the linker looks for libX.so.
ln -sfn lib "$home/lib64"
for library in "$home"/lib/lib*.so.*; do
  ln -sf "$(basename "$library")" "${library%%.so.*}.so"
done

# libcuda comes with the driver. Without a driver, the linker gets a stub that defines the symbols.
sys=$(cargo metadata --format-version 1 --features cuda |
  python3 -c 'import json, sys, pathlib
print(next(pathlib.Path(p["manifest_path"]).parent for p in json.load(sys.stdin)["packages"] if p["name"] == "cudarc"))')
grep -oE 'fn cu[A-Za-z0-9_]+' "$sys/src/driver/sys/mod.rs" | sort -u | sed 's|fn \(.*\)|void \1(void) {}|' > "$folder/libcuda.c"
mkdir -p "$home/lib/stubs"
cc -shared -Wl,-soname,libcuda.so.1 -o "$home/lib/stubs/libcuda.so" "$folder/libcuda.c"

cat > "$folder/env" <<END
export CUDA_HOME="$home"
export CUDNN_INCLUDE="$packages/nvidia/cudnn/include"
export CUDNN_FRONTEND_INCLUDE="$packages/include"
export PATH="$home/bin:\$PATH"
# Without a GPU to detect: candle's kernels for Ampere, which later GPUs run too, ours for each from Ampere to Hopper.
if [ -z "\${CUDA_COMPUTE_CAP:-}" ] && ! nvidia-smi > /dev/null 2>&1; then
  export CUDA_COMPUTE_CAP=80 TRAINER_CUDA_CAPS=80,86,89,90a
fi
END
echo "source ${folder#"$PWD/"}/env"
