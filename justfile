# Recipes for contributors. `just` lists them; docs/contributing.md explains them.

# list the recipes
default:
    @just --list --unsorted

# format the code
[group('check')]
fmt:
    cargo fmt --all

# clippy, warnings denied
[group('check')]
lint:
    cargo clippy --all-targets -- -D warnings

# the tests, or those whose names contain FILTER
[group('check')]
test *FILTER:
    cargo test {{ FILTER }}

# the tests of layers and models on the reference backend, and twenty updates of every job in configs/ on it
[group('check')]
reference:
    TRAINER_TEST_BACKEND=reference cargo test --lib -- layers:: models::
    cargo build --release
    TRAINER_BINARY=target/release/trainer cargo test --test integration reference:: -- --include-ignored --nocapture

# everything that must pass before a change is merged
[group('check')]
ci:
    .ci/run

# fetch CUDA's compiler and libraries from PyPI into FOLDER; needs no root
[group('cuda')]
cuda-toolkit FOLDER="target/cuda-toolkit":
    scripts/cuda-toolkit.sh {{ FOLDER }}

# type-check and lint the CUDA code; needs no GPU
[group('cuda')]
check-cuda:
    NVCC_APPEND_FLAGS="-Werror all-warnings" scripts/with-cuda.sh cargo clippy --all-targets --features cuda,cudnn --target-dir target/cuda -- -D warnings

# the unit tests of layers, kernels, optimizers and GPU memory on a GPU, or those whose names contain FILTER
[group('cuda')]
test-cuda *FILTER:
    TRAINER_TEST_DEVICE=cuda scripts/with-cuda.sh cargo test --features cuda,cudnn --target-dir target/cuda --lib -- layers:: graph:: kernels:: optim:: param memory::gpu {{ FILTER }}

# pack the tests into FOLDER for a machine with a GPU and without cargo; test-carried.sh in that folder runs them
[group('cuda')]
carry-tests FOLDER="target/carried":
    scripts/carry-tests.sh {{ FOLDER }}

# end-to-end trials on this machine's GPU: all of them, or the TRIALS named
[group('cuda')]
trials-cuda *TRIALS:
    scripts/with-cuda.sh cargo build --release --features cuda,cudnn --target-dir target/cuda
    TRAINER_JOBS=target/bounds cargo test --test integration bounds::writes_its_jobs
    python3 scripts/gpu-trials.py --trainer target/cuda/release/trainer {{ TRIALS }}

# compare training steps with PyTorch on this machine's GPU (needs torch and torchvision with CUDA)
[group('cuda')]
bench-cuda *ARGS:
    scripts/with-cuda.sh cargo build --release --features cuda,cudnn --target-dir target/cuda
    python3 bench/cuda.py --trainer target/cuda/release/trainer {{ ARGS }}

# regenerate docs/job.md and docs/events.md
[group('generate')]
docs:
    TRAINER_UPDATE_SNAPSHOTS=1 cargo test --test integration jobs::the_reference_page
    TRAINER_UPDATE_DOCS=1 cargo test --lib events_page

# regenerate the expected outputs in tests/snapshots
[group('generate')]
snapshots:
    TRAINER_UPDATE_SNAPSHOTS=1 cargo test
    git diff --stat -- tests/snapshots

# train the quickstart job
[group('run')]
quickstart *ARGS:
    cargo run --release -- fit configs/quickstart.toml {{ ARGS }}

# fuzz the reader of one file format for SECONDS; docs/contributing.md lists the targets
[group('prove')]
fuzz TARGET="job" SECONDS="60":
    python3 fuzz/seeds.py {{ TARGET }}
    cd fuzz && RUSTC_WRAPPER="$PWD/instrument" cargo build
    mkdir -p fuzz/artifacts
    cd fuzz && TARGET={{ TARGET }} target/debug/fuzz corpus/{{ TARGET }} -max_total_time={{ SECONDS }} \
        -rss_limit_mb=2048 -malloc_limit_mb=512 -timeout=20 -max_len=4096 -artifact_prefix=artifacts/{{ TARGET }}- -print_final_stats=1

# kill runs at random points and resume them, TRIALS times
[group('prove')]
kill-resume TRIALS="50":
    TRAINER_KILL_TRIALS={{ TRIALS }} cargo test --release --test integration runs::kill -- --nocapture

# run random jobs for a range of SEEDS and check every guarantee; failing jobs stay in target/trials
[group('prove')]
trials-random SEEDS="0..1000" PARALLEL="2":
    TRAINER_TRIALS_SEEDS={{ SEEDS }} TRAINER_TRIALS_PARALLEL={{ PARALLEL }} cargo test --test integration random::trials -- --ignored --nocapture --exact

# run the random job of one SEED and keep its job, data and runs in target/trials/SEED
[group('prove')]
trial SEED:
    TRAINER_TRIALS_SEEDS={{ SEED }} TRAINER_TRIALS_KEEP=1 cargo test --test integration random::trials -- --ignored --nocapture --exact

# at every file-system call that touches the run directory: kill the run, or fail the call with ENOSPC or EIO
[group('prove')]
faults:
    TRAINER_FAULT_SWEEP=all cargo test --test integration faults:: -- --nocapture

# drive `trainer fit` in tmux at several widths, show the screen at each stage, and check it
[group('prove')]
terminal *WIDTHS:
    cargo build --release
    scripts/terminal-snapshots.sh target/release/trainer {{ WIDTHS }}

# train three epochs on a dataset 20 times larger than MIB of memory (10 GiB of data: just flat 512)
[group('measure')]
flat MIB="52":
    TRAINER_FLAT_MIB={{ MIB }} cargo test --release --test integration streams::memory_stays_flat -- --nocapture

# compare training steps with PyTorch on this machine's CPU (needs torch and torchvision)
[group('measure')]
bench-cpu *ARGS:
    cargo build --release
    python3 bench/cpu.py {{ ARGS }}

# compare reading a csv file of 1 GB with pandas (needs numpy and pandas)
[group('measure')]
bench-csv *ARGS:
    cargo build --release --example rows
    python3 bench/tables.py {{ ARGS }}

# exchange checkpoints with transformers and torchvision in both directions (needs both, torch and safetensors)
[group('prove')]
interop:
    cargo build --release --bins --examples
    python3 scripts/interop.py

# read a run with the real MLflow and TensorBoard (needs both)
[group('prove')]
tracking-interop:
    cargo build --release
    python3 scripts/tracking-interop.py

# train on real tables and images, and compare the metrics with scikit-learn's (needs pandas and scikit-learn)
[group('prove')]
real-sets *ARGS:
    cargo build --release
    python3 scripts/real-sets.py target/release/trainer {{ ARGS }}
