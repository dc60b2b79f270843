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

    /// Several capabilities to compile for, with commas between them; else it is the one of `CUDA_COMPUTE_CAP`, which candle's
    /// kernels are compiled for, or of the card that is here.
    const COMPUTE_CAPS_ENV: &str = "TRAINER_CUDA_CAPS";

    /// Plain C++ over the headers of cuDNN's front end: graphs are built once a shape, so its own speed is of no
    /// account, and without nvcc they compile in a third of the time.
    const CUDNN_SOURCES: [&str; 3] =
        ["src/kernels/cuda/cudnn.cpp", "src/kernels/attention/cudnn.cpp", "src/kernels/conv/cudnn.cpp"];

    pub fn build() {
        for name in
            ["CUDA_COMPUTE_CAP", COMPUTE_CAPS_ENV, "CUDA_HOME", "CUDNN_INCLUDE", "CUDNN_FRONTEND_INCLUDE"]
        {
            println!("cargo::rerun-if-env-changed={name}");
        }
        println!("cargo::rerun-if-changed=src/kernels");
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
            .source_glob("src/kernels/**/*.cu")
            .watch(headers())
            .include_path("src/kernels")
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

    /// What all kernels are compiled anew for.
    fn headers() -> Vec<PathBuf> {
        let entries = std::fs::read_dir("src/kernels/cuda").into_iter().flatten().flatten();
        let is_header = |path: &PathBuf| path.extension().is_some_and(|end| end == "cuh" || end == "h");
        let mut headers: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_header).collect();
        headers.sort();
        headers
    }

    fn build_cudnn_sources() {
        let mut build = cc::Build::new();
        build.cpp(true).std("c++17").opt_level(1).warnings(false).include("src/kernels");
        build.include(find_include_dir("cuda_runtime.h", "CUDA_INCLUDE"));
        if cfg!(feature = "cudnn") {
            build.include(find_include_dir("cudnn.h", "CUDNN_INCLUDE"));
            build.include(find_include_dir("cudnn_frontend.h", "CUDNN_FRONTEND_INCLUDE"));
            build.define("TRAINER_CUDNN", None);
        }
        build.files(CUDNN_SOURCES).compile("trainer_cudnn");
    }

    /// Where a header is: in the folder a variable names, or where an installed toolkit has it.
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
