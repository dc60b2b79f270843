"""Trains a small network on MNIST, factorizes it to a fraction of its parameters, trains on and prints what was lost.

    python bench/lowrank.py --trainer target/release/trainer --mnist path/to/mnist [--model mlp] [--targets 2x,4x]

The whole model is trained for --epochs, the factorized one for one more epoch with a tenth of the learning rate. Sizes
are of the exported model.safetensors, in f32; accuracy is that on the test set after the last update.
"""

import tempfile

import mnist

MODELS = {
    "mlp": 'kind = "mlp"\nhidden = [256, 128]',
    "cnn": f"{mnist.cnn(32, 128)}\ndropout = 0.3",
}


def main():
    parser = mnist.parser(__doc__, batch_size=64)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--targets", default="2x,4x", help="how many times smaller, separated by commas")
    args = parser.parse_args()
    print("| model | file | smaller | accuracy | lost |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        bench = mnist.Bench(args, scratch)

        def trained(name, epochs, lr, init="", rest=""):
            """Trains and exports; returns the bytes of the weights and the accuracy on the test set."""
            rest = f"[optimizer]\nlr = {lr}\n{rest}"
            _, accuracy = bench.fit(name, bench.job(args.seed, MODELS[args.model], epochs, init, rest))
            return bench.export(name, "--format", "safetensors")[0].stat().st_size, accuracy

        whole, before = trained("whole", args.epochs, 1e-3)
        print(f"| as trained | {whole / 1024:.0f} KiB | | {before:.2%} | |", flush=True)
        for target in args.targets.split(","):
            size, accuracy = trained(f"lowrank-{target}", 1, 1e-4, "whole", f'[lowrank]\ntarget = "{target}"\n')
            lost = f"{100 * (before - accuracy):.2f} points"
            sizes = f"{size / 1024:.0f} KiB | {whole / size:.2f}x"
            print(f"| low rank {target} | {sizes} | {accuracy:.2%} | {lost} |", flush=True)


if __name__ == "__main__":
    main()
