"""Trains a small network on MNIST, prunes it, quantizes it, and prints file size, gzipped size and accuracy of each.

    python bench/compress.py --trainer target/release/trainer --mnist path/to/mnist [--epochs 2] [--final 0.8,0.95]

The recipe is that of TensorFlow's pruning tutorial: a trained network is trained on for two epochs, while its sparsity
grows from 50 % to the final one; here in their first two thirds, so that the weights settle, and with one threshold for
all weights, so that a layer of few weights keeps more of them. Then int8 after training.
"Smaller" compares gzipped sizes, gzip's default level, with the model as trained in f32. "Lost" are points of accuracy
on the test set.
"""

import gzip
import tempfile

import mnist

FORMATS = [("f32", ["--format", "tflite"]), ("int8", ["--format", "tflite", "--quantize", "int8"])]


def main():
    parser = mnist.parser(__doc__)
    parser.add_argument("--epochs", type=int, default=2, help="of the pruning")
    parser.add_argument("--dense-epochs", type=int, default=4, help="of the network that is pruned")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--channels", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--final", default="0.8,0.95", help="sparsities, separated by commas")
    args = parser.parse_args()
    print("| model | weights | file | gzipped | smaller | accuracy | lost |\n|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        bench, whole = mnist.Bench(args, scratch), None
        model = (args.seed, mnist.cnn(args.channels, args.hidden))
        bench.fit("dense", bench.job(*model, args.dense_epochs))
        for sparsity in [0.0, *map(float, args.final.split(","))]:
            name = f"pruned-{sparsity}" if sparsity else "dense"
            if sparsity:
                steps = bench.steps(args.epochs)
                prune = f"[prune]\ninitial = 0.5\nfinal = {sparsity}\nend_step = {steps * 2 // 3}\nevery_steps = 20\n"
                prune += 'scope = "global"\n'
                bench.fit(name, bench.job(*model, args.epochs, init="dense", rest=prune))
            for dtype, options in FORMATS:
                file, metrics = bench.export(name, *options)
                accuracy = metrics["accuracy"][1]
                size, packed = file.stat().st_size, len(gzip.compress(file.read_bytes(), 6))
                whole = whole or (packed, accuracy)
                cells = [f"pruned to {sparsity:.0%}" if sparsity else "as trained", dtype]
                cells += [f"{size / 1024:.1f} KiB", f"{packed / 1024:.1f} KiB", f"{whole[0] / packed:.1f} x"]
                cells += [f"{accuracy:.2%}", f"{(whole[1] - accuracy) * 100:.2f}"]
                print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
