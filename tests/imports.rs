//! Imports go downwards only: no module uses one that stands above it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The packages, and the module that a package is as a whole. What is not of the others is of the last, whose folder
/// contains theirs.
const PACKAGES: [(&str, Option<&str>); 4] =
    [("src/config", None), ("src/data", Some("data")), ("src/engine", None), ("src", None)];

/// The modules of all packages from the floor up. A module may use those before it, and itself.
const ORDER: [&str; 23] = [
    "base",
    "job",
    "data",
    "metrics",
    "params",
    "memory",
    "kernels",
    "param_store",
    "layers",
    "graph",
    "optim",
    "models",
    "quantization",
    "planner",
    "events",
    "train",
    "inference",
    "tune",
    "history",
    "report",
    "cli",
    "lib",
    "main",
];

/// Imports that go upwards still, as (module, what it uses).
const EXCEPTIONS: [(&str, &str); 0] = [];

/// The code of a file without its comments and without what is compiled for tests alone.
fn product_code(text: &str) -> String {
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code = lines.collect::<Vec<_>>().join("\n");
    let end = code.find("#[cfg(test)]\nmod tests").unwrap_or(code.len());
    code[..end].to_owned()
}

/// Modules that a file's code names by `crate::`.
fn imports(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        if let Some(list) = rest.strip_prefix('{') {
            let list = list.split('}').next().unwrap_or_default();
            found.extend(
                list.split(',').map(|item| item.trim().split("::").next().unwrap_or_default().to_owned()),
            );
        } else {
            found.extend(rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().map(str::to_owned));
        }
    }
    found
}

/// (module, file, code) of every source file that is not for tests alone.
fn sources(folder: &Path, module: Option<&str>, found: &mut Vec<(String, String, String)>) {
    for entry in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let stem = entry.file_stem().unwrap().to_string_lossy().into_owned();
        if PACKAGES.iter().any(|(package, _)| entry.ends_with(package)) || stem == "build" {
            continue;
        }
        let module = module.unwrap_or(&stem).to_owned();
        if entry.is_dir() {
            sources(&entry, Some(&module), found);
        } else if entry.extension().is_some_and(|e| e == "rs")
            && !matches!(stem.as_str(), "tests" | "fixtures" | "gradcheck")
        {
            let code = product_code(&fs::read_to_string(&entry).unwrap());
            found.push((module, entry.display().to_string(), code));
        }
    }
}

/// (module, file, code) of every source file of the packages that is not for tests alone.
pub fn product_files() -> Vec<(String, String, String)> {
    let mut files = Vec::new();
    for (package, module) in PACKAGES {
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join(package), module, &mut files);
    }
    files
}

#[test]
fn no_module_imports_one_above_it() {
    let files = product_files();
    let rank = |module: &str| ORDER.iter().position(|known| *known == module);
    let mut upwards = Vec::new();
    for (module, file, code) in &files {
        let own =
            rank(module).unwrap_or_else(|| panic!("{file}: module `{module}` has no place in the order"));
        for used in imports(code) {
            // Macros of the crate are at its root.
            let Some(place) = rank(&used) else { continue };
            if place > own && !EXCEPTIONS.contains(&(module, &used)) {
                upwards.push(format!("{file}: `{module}` uses `{used}`, which stands above it"));
            }
        }
    }
    assert!(upwards.is_empty(), "{}", upwards.join("\n"));
    assert!(files.len() > 200, "only {} files were read", files.len());
}

#[test]
fn an_import_upwards_is_noticed() {
    let code = product_code(
        "use crate::{train, base::units};\n// crate::cli\nfn f() { crate::report::x() }\n#[cfg(test)]\nmod tests { use crate::cli; }",
    );
    assert_eq!(imports(&code), ["base", "report", "train"].map(str::to_owned).into());
}
