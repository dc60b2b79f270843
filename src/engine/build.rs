//! Compiles the CUDA kernels. Does nothing without the feature `cuda`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    cuda::build();
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::env;
    use std::path::{Path, PathBuf};

    /// Comma-separated compute capabilities to compile for. Without it, the kernels target `CUDA_COMPUTE_CAP`, as
    /// candle's do, or the GPU of this machine.
    const COMPUTE_CAPS_ENV: &str = "TRAINER_CUDA_CAPS";

    /// Plain C++ over the headers of the cuDNN frontend. Graphs are built once per shape, so their host code need not
    /// be fast, and without nvcc they compile in a third of the time.
    const CUDNN_SOURCES: [&str; 3] =
        ["kernels/cuda/cudnn.cpp", "kernels/attention/cudnn.cpp", "kernels/conv/cudnn.cpp"];

    pub fn build() {
        for name in
            ["CUDA_COMPUTE_CAP", COMPUTE_CAPS_ENV, "CUDA_HOME", "CUDNN_INCLUDE", "CUDNN_FRONTEND_INCLUDE"]
        {
            println!("cargo::rerun-if-env-changed={name}");
        }
        println!("cargo::rerun-if-changed=kernels");
        let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
        build_kernels(&out.join("libtrainer_kernels.a"));
        build_cudnn_sources();
        println!("cargo::rustc-link-search=native={}", out.display());
        for library in
            ["static=trainer_kernels", "dylib=cublasLt", "dylib=cudart", "dylib=stdc++", "dylib=dl"]
        {
            println!("cargo::rustc-link-lib={library}");
        }
    }

    fn build_kernels(archive: &Path) {
        let mut builder = cudaforge::KernelBuilder::new()
            .source_glob("kernels/**/*.cu")
            .watch(headers())
            .include_path("kernels")
            .thread_percentage(1.0)
            .args(["-std=c++17", "-O3", "--expt-relaxed-constexpr"]);
        let compute_caps = env::var(COMPUTE_CAPS_ENV).unwrap_or_default();
        for (i, cap) in compute_caps.split(',').map(str::trim).filter(|cap| !cap.is_empty()).enumerate() {
            builder = match i {
                0 => builder.compute_cap_arch(cap),
                _ => builder.arg(&format!("-gencode=arch=compute_{cap},code=sm_{cap}")),
            };
        }
        if let Err(error) = builder.build_lib(archive) {
            panic!("the CUDA kernels do not compile: {error}; docs/cuda.md says what a build needs")
        }
    }

    /// Headers that every kernel depends on: a change rebuilds all of them.
    fn headers() -> Vec<PathBuf> {
        let entries = std::fs::read_dir("kernels/cuda").into_iter().flatten().flatten();
        let is_header = |path: &PathBuf| path.extension().is_some_and(|end| end == "cuh" || end == "h");
        let mut headers: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_header).collect();
        headers.sort();
        headers
    }

    fn build_cudnn_sources() {
        let mut build = cc::Build::new();
        build.cpp(true).std("c++17").opt_level(1).warnings(false).include("kernels");
        build.include(find_include_dir("cuda_runtime.h", "CUDA_INCLUDE"));
        if cfg!(feature = "cudnn") {
            build.include(find_include_dir("cudnn.h", "CUDNN_INCLUDE"));
            build.include(find_include_dir("cudnn_frontend.h", "CUDNN_FRONTEND_INCLUDE"));
            build.define("TRAINER_CUDNN", None);
        }
        build.files(CUDNN_SOURCES).compile("trainer_cudnn");
    }

    /// Finds the folder of a header: from an environment variable, or in an installed toolkit.
    fn find_include_dir(header: &str, variable: &str) -> PathBuf {
        let home = env::var("CUDA_HOME").unwrap_or_else(|_| "/usr/local/cuda".into());
        let folders = [env::var(variable).unwrap_or_default(), home + "/include", "/usr/include".into()];
        match folders.iter().find(|folder| Path::new(folder).join(header).is_file()) {
            Some(folder) => PathBuf::from(folder),
            None => panic!(
                "no `{header}` in ${variable}, {} or /usr/include; docs/cuda.md says what a build needs",
                folders[1]
            ),
        }
    }
}
