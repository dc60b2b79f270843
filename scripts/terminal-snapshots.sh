#!/usr/bin/env bash
# Shows what `trainer fit` looks like in a real terminal: drives tmux at several widths, and prints what is on the screen
# at each stage of a run. Fails if a line is wider than the terminal, or a progress line stays behind.
#
#   scripts/terminal-snapshots.sh [PROGRAM] [WIDTH ...]     PROGRAM: target/release/trainer; WIDTH: 60 100 180
#
# SAMPLES is the number of samples of an update, which should take a few seconds: 10000, and 40 for a build without
# optimization.
set -euo pipefail
export LC_ALL=C.UTF-8 # Widths are counted in characters.

program=$(realpath "${1:-target/release/trainer}")
shift || true
widths=("${@:-60}")
[ $# -eq 0 ] && widths=(60 100 180)
command -v tmux > /dev/null || { echo "this script needs tmux" >&2; exit 2; }

samples=${SAMPLES:-10000}
folder=$(mktemp -d)
session="trainer-snapshots-$$"
trap 'tmux kill-session -t "$session" 2> /dev/null || true; rm -rf "$folder"' EXIT
ln -s "$program" "$folder/trainer"
cat > "$folder/job.toml" <<END
name = "quick"

[model]
kind = "cnn"

[data]
kind = "shapes"
train_samples = $((4 * samples))
valid_samples = $samples

[train]
batch_size = $((samples / 20))
accumulation_steps = 20
epochs = 3
END

failed=0

# What is on each row.
rows() { tmux capture-pane -p -t "$session" -S -; }

screen() { rows | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}'; }

last_row() { rows | grep -v '^$' | tail -1; }

# The screen, with the lines that the terminal broke joined again.
joined() { tmux capture-pane -p -J -t "$session" -S - | sed 's/ *$//'; }

show() { echo; echo "--- $width columns: $1"; screen; }

# Waits until the screen has a line that matches.
wait_for() {
    for _ in $(seq 600); do
        rows | grep -qE "$1" && return
        sleep 0.1
    done
    echo "FAILED: no \`$1\` at $width columns" >&2
    screen >&2
    exit 1
}

# At most so many progress lines are on the screen, and no line is wider than it, except what was typed and the
# command to paste.
check() {
    local progress wide
    while IFS= read -r wide; do
        if [ "${#wide}" -gt "$width" ]; then
            echo "FAILED: wider than $width columns: $wide" >&2
            failed=1
        fi
    done < <(joined | grep -vE '^(\$|resume  ) ')
    progress=$(rows | grep -cE '^(epoch +[0-9]+/|step +[0-9,]+/|eval    step|saving|starting)' || true)
    if [ "$progress" -gt "$1" ]; then
        echo "FAILED: $progress progress lines at $width columns" >&2
        failed=1
    fi
}

type() { tmux send-keys -t "$session" "$1" Enter; }

for width in "${widths[@]}"; do
    rm -rf "$folder/run"
    tmux new-session -d -s "$session" -x "$width" -y 50 -c "$folder" 'PS1="$ " bash --norc --noprofile'
    sleep 0.5
    type './trainer plan job.toml --device cpu'
    wait_for 'process'
    sleep 0.5
    show 'the plan'
    check 0
    type 'clear'
    type './trainer fit job.toml --device cpu --run-dir run'
    wait_for '[0-9]/[0-9,]+ samples'
    before=$(last_row)
    moves=0
    for _ in $(seq 6); do
        sleep 0.5
        after=$(last_row)
        if [ "$before" != "$after" ]; then moves=$((moves + 1)); else echo "twice: $after" >&2; fi
        before=$after
    done
    show "progress, which moved in $moves of 6 half seconds"
    tmux resize-window -t "$session" -x $((width * 2 / 3))
    sleep 0.5
    show 'a narrower window'
    check 1
    tmux resize-window -t "$session" -x "$width"
    sleep 0.5
    [ "$moves" -eq 6 ] || { echo "FAILED: progress stood still at $width columns" >&2; failed=1; }
    check 1
    wait_for '^eval    step'
    show 'an evaluation'
    check 1
    wait_for '^eval   step'
    wait_for '^(epoch +[0-9]+/|step +)'
    tmux send-keys -t "$session" C-c
    sleep 0.3
    show 'Ctrl-C, 0.3 s later'
    check 1
    rows | grep -qE '^stop   ' || { echo "FAILED: Ctrl-C is not answered at $width columns" >&2; failed=1; }
    wait_for '^resume   '
    sleep 0.5
    show 'its end'
    check 0
    type 'clear'
    type './trainer fit job.toml --device cpu --resume run'
    wait_for '[0-9]/[0-9,]+ samples'
    tmux send-keys -t "$session" C-c
    wait_for '^stop   '
    tmux send-keys -t "$session" C-c
    wait_for '^resume   '
    sleep 0.5
    show 'resumed, and Ctrl-C twice'
    check 0
    tmux kill-session -t "$session"
done
exit $failed
