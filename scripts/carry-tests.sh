#!/usr/bin/env bash
# Packs the unit tests built with CUDA, the random-job tests with the program that they drive, and the script that runs
# both on a machine without cargo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-target/carried}
mkdir -p "$folder"

# Prints the path of the executable that a cargo build produces.
executable() {
  "$@" --message-format=json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1
}
pack() {
  strip -o "$folder/$2" "$1"
  gzip -f "$folder/$2"
}
cuda=(--features cuda,cudnn --target-dir target/cuda)
for package in trainer-engine trainer; do
  pack "$(executable scripts/with-cuda.sh cargo test -p "$package" "${cuda[@]}" --lib --no-run)" "$package-tests"
done
pack "$(executable scripts/with-cuda.sh cargo build --release "${cuda[@]}")" trainer
# The random-job tests need no CUDA: they only start the program.
pack "$(executable cargo test --test integration --no-run)" integration-tests
cp scripts/test-carried.sh "$folder/"
echo "$folder: copy it to the machine with the GPU, and run test-carried.sh there"
