"""Trains a student on a part of MNIST, alone and with a teacher, and prints how much of the gap distillation closes.

    python bench/distill.py --trainer target/release/trainer --mnist path/to/mnist [--seeds 1,2,3]

The teacher was trained on the whole training set; the student, a network of the same kind with a quarter of the
parameters, sees the first samples of it only, with the same recipe alone and with the teacher. Accuracies are of
the test set, means over the seeds of the student, with their standard deviation; the teacher is trained once.
"""

import statistics
import tempfile

import mnist

RECIPE = """
[data.augment]
translate = 0.1
rotation = 10
[optimizer]
lr = {lr}
"""


def main():
    parser = mnist.parser(__doc__)
    parser.add_argument("--student-samples", type=int, default=2000)
    parser.add_argument("--student-batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.003, help="of the student")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--teacher-epochs", type=int, default=4)
    parser.add_argument("--seeds", default="1,2,3", help="seeds of the student, separated by commas")
    parser.add_argument("--temperature", type=float, default=4.0)
    parser.add_argument("--weight", type=float, default=1.0)
    args = parser.parse_args()
    distill = f'[distill]\nteacher = "teacher"\ntemperature = {args.temperature}\nweight = {args.weight}\n'
    print("| model | parameters | samples | accuracy |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        bench = mnist.Bench(args, scratch)
        size, teacher = bench.fit("teacher", bench.job(42, mnist.cnn(16, 64), args.teacher_epochs))
        print(f"| teacher | {size:,} | {bench.samples:,} | {teacher:.2%} |", flush=True)
        bench.keep(args.student_samples)
        bench.batch = args.student_batch_size
        means = {}
        recipe = RECIPE.format(lr=args.lr)
        for name, rest in [("alone", recipe), ("distilled", recipe + distill)]:
            jobs = {seed: bench.job(seed, mnist.cnn(8, 30), args.epochs, rest=rest) for seed in args.seeds.split(",")}
            runs = [bench.fit(f"{name}-{seed}", job) for seed, job in jobs.items()]
            means[name] = statistics.mean(accuracy for _, accuracy in runs)
            spread = statistics.stdev(accuracy for _, accuracy in runs) if len(runs) > 1 else 0
            cells = [f"student, {name}", f"{runs[0][0]:,}", f"{bench.samples:,}", f"{means[name]:.2%} ± {spread:.2%}"]
            print(f"| {' | '.join(cells)} |", flush=True)
        closed = (means["distilled"] - means["alone"]) / (teacher - means["alone"])
        print(f"\n{closed:.0%} of the gap closed")


if __name__ == "__main__":
    main()
