//! Compiles the CUDA kernels, and nothing at all without the feature `cuda`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    cuda::build();
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::env;
    use std::path::{Path, PathBuf};

    /// Capabilities to compile for where none is asked for and no card is here: Ampere, Ada and Hopper.
    const EVERYWHERE: [&str; 4] = ["80", "86", "89", "90"];

    pub fn build() {
        for name in ["CUDA_COMPUTE_CAP", "CUDA_HOME", "CUDNN_INCLUDE", "CUDNN_FRONTEND_INCLUDE"] {
            println!("cargo::rerun-if-env-changed={name}");
        }
        println!("cargo::rerun-if-changed=src/kernels");
        let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
        let mut builder = cudaforge::KernelBuilder::new()
            .source_glob("src/kernels/**/*.cu")
            .watch(["src/kernels/cuda"])
            .include_path("src/kernels")
            .args(["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC"]);
        if env::var_os("CUDA_COMPUTE_CAP").is_none() && cudaforge::detect_compute_cap().is_err() {
            builder = builder.compute_cap_arch(EVERYWHERE[0]);
            for cap in &EVERYWHERE[1..] {
                builder = builder.arg(&format!("-gencode=arch=compute_{cap},code=sm_{cap}"));
            }
        }
        if cfg!(feature = "cudnn") {
            for (variable, header) in
                [("CUDNN_INCLUDE", "cudnn.h"), ("CUDNN_FRONTEND_INCLUDE", "cudnn_frontend.h")]
            {
                builder = builder.include_path(headers(variable, header));
            }
            builder = builder.arg("-DTRAINER_CUDNN");
        }
        if let Err(error) = builder.build_lib(out.join("libtrainer_kernels.a")) {
            panic!("the CUDA kernels do not compile: {error}; docs/cuda.md says what a build needs")
        }
        println!("cargo::rustc-link-search=native={}", out.display());
        println!("cargo::rustc-link-lib=static=trainer_kernels");
        println!("cargo::rustc-link-lib=dylib=cublasLt");
        println!("cargo::rustc-link-lib=dylib=cudart");
        println!("cargo::rustc-link-lib=stdc++");
    }

    /// The folder of a header: named by a variable, or where an installed toolkit has it.
    fn headers(variable: &str, header: &str) -> PathBuf {
        let home = env::var("CUDA_HOME").unwrap_or_else(|_| "/usr/local/cuda".into());
        let places =
            [env::var(variable).unwrap_or_default(), format!("{home}/include"), "/usr/include".into()];
        match places.iter().find(|place| Path::new(place).join(header).is_file()) {
            Some(place) => PathBuf::from(place),
            None => panic!(
                "`{header}` is not in ${variable}, {} or {}; docs/cuda.md says what a build needs",
                places[1], places[2]
            ),
        }
    }
}
