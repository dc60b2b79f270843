//! GFLOP/s of the f32 GEMM at the shapes that layers use: `cargo run --release --example matmul`.
//!
//! Columns: the forward pass (`x w'`), the input gradient (`x w`), the weight gradient (`d' x`), and the forward pass on
//! one thread.

use std::time::Instant;

use trainer::kernels::matmul::{MatView, Threading, gemm};

fn main() {
    println!(
        "{:>6} {:>6} {:>6}  {:>10} {:>10} {:>10} {:>10}",
        "m", "k", "n", "x w'", "x w", "d' x", "x w' (1)"
    );
    for (m, k, n) in [
        (128, 784, 512),
        (768, 128, 512),
        (768, 512, 128),
        (1024, 384, 1152),
        (1024, 1536, 384),
        (256, 288, 64),
        (256, 4608, 512),
    ] {
        let x: Vec<f32> = (0..m * k).map(|i| (i % 17) as f32 - 8.0).collect();
        let w: Vec<f32> = (0..k * n).map(|i| (i % 13) as f32 - 6.0).collect();
        let d: Vec<f32> = (0..m * n).map(|i| (i % 11) as f32 - 5.0).collect();
        let mut out = vec![0f32; m * n];
        let mut dw = vec![0f32; k * n];
        let rate = |body: &mut dyn FnMut()| {
            let mut best = f64::MAX;
            for _ in 0..30 {
                let begun = Instant::now();
                body();
                best = best.min(begun.elapsed().as_secs_f64());
            }
            2.0 * (m * k * n) as f64 / best / 1e9
        };
        let (xm, wt) = (MatView::new(&x, m, k), MatView::new(&w, n, k).t());
        let nt = rate(&mut || gemm::<f32>(&mut out, n, xm, wt, false, Threading::Parallel));
        let nn =
            rate(&mut || gemm::<f32>(&mut out, n, xm, MatView::new(&w, k, n), false, Threading::Parallel));
        let tn =
            rate(&mut || gemm::<f32>(&mut dw, k, MatView::new(&d, m, n).t(), xm, true, Threading::Parallel));
        let one = rate(&mut || gemm::<f32>(&mut out, n, xm, wt, false, Threading::Serial));
        println!("{m:>6} {k:>6} {n:>6}  {nt:>10.0} {nn:>10.0} {tn:>10.0} {one:>10.0}");
    }
}
