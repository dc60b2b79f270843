#!/usr/bin/env bash
# Packs the unit tests, built for cards, with the script that runs them on a machine without cargo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-target/carried}
mkdir -p "$folder"
built=$(scripts/with-cuda.sh cargo test --features cuda,cudnn --target-dir target/cuda --lib --no-run --message-format=json |
  sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
strip -o "$folder/trainer-tests" "$built"
gzip -f "$folder/trainer-tests"
cp scripts/test-carried.sh "$folder/"
echo "$folder: copy it to the machine with the card, and run test-carried.sh there"
