//! What Rust and CUDA agree on is checked without a GPU or a compiler for it: a function that Rust declares is defined
//! in the CUDA sources with the same arguments, and a struct that both read has the same fields.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::harness::root;

/// Names, and how each argument or field is passed.
type Signatures = BTreeMap<String, Vec<String>>;

#[test]
fn rust_declares_the_functions_that_the_cuda_sources_define() {
    let declared = signatures(&["rs"], rust_functions);
    let defined = signatures(&["cu", "cpp"], c_functions);
    assert!(declared.len() > 50, "{} functions", declared.len());
    assert_same(&declared, &defined);
}

#[test]
fn structs_have_the_same_fields_in_rust_and_in_cuda() {
    let rust = flattened(signatures(&["rs"], rust_structs));
    let c = flattened(signatures(&["cu", "cuh", "cpp", "h"], c_structs));
    assert!(rust.len() > 10, "{} structs", rust.len());
    assert_same(&rust, &c);
}

#[test]
fn grids_have_the_same_size_in_rust_and_in_cuda() {
    let header = fs::read_to_string(root().join("src/engine/kernels/cuda/device.cuh")).expect("the header");
    let constant = format!("constexpr int GRID_SMS = {};", trainer::kernels::grid::GRID_SMS);
    assert!(header.contains(&constant), "no `{constant}`");
}

/// The structs that are no field of another, with the fields of those that are in their place.
fn flattened(structs: Signatures) -> Signatures {
    let fields_of = |field: &String| structs.get(field).cloned().unwrap_or_else(|| vec![field.clone()]);
    let is_nested = |name: &String| structs.values().flatten().any(|field| field == name);
    let outer = structs.iter().filter(|(name, _)| !is_nested(name));
    outer.map(|(name, fields)| (name.clone(), fields.iter().flat_map(fields_of).collect())).collect()
}

#[test]
fn a_difference_is_found() {
    let rust =
        "unsafe extern \"C\" {\n    fn f(rows: i64, to: *mut c_void, stream: RawStream) -> c_int;\n}\n";
    let same = "extern \"C\" int f(int64_t rows, void *to, cudaStream_t stream) {\n";
    let other = "extern \"C\" int f(int rows, void *to, cudaStream_t stream) {\n";
    assert_eq!(rust_functions(rust), c_functions(same));
    assert_ne!(rust_functions(rust), c_functions(other));
}

fn assert_same(rust: &Signatures, c: &Signatures) {
    let differ: Vec<String> = rust
        .iter()
        .filter(|(name, args)| c.get(*name) != Some(args))
        .map(|(name, args)| match c.get(name) {
            Some(other) => format!("{name}: ({}) in Rust, ({}) in CUDA", args.join(", "), other.join(", ")),
            None => format!("{name}: not in the CUDA sources"),
        })
        .collect();
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}

/// What the sources with one of these extensions contain.
fn signatures(extensions: &[&str], parse: fn(&str) -> Signatures) -> Signatures {
    fn walk(folder: &Path, extensions: &[&str], parse: fn(&str) -> Signatures, found: &mut Signatures) {
        for entry in fs::read_dir(folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, extensions, parse, found);
            } else if path.extension().is_some_and(|end| extensions.iter().any(|e| end == *e)) {
                let text = fs::read_to_string(&path).expect("a source file");
                let code: Vec<&str> =
                    text.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
                found.extend(parse(&code.join("\n")));
            }
        }
    }
    let mut found = Signatures::new();
    walk(&root().join("src/engine/kernels"), extensions, parse, &mut found);
    found
}

/// Functions of the blocks `unsafe extern "C"`, but those of libraries.
fn rust_functions(code: &str) -> Signatures {
    let blocks = code.split("unsafe extern \"C\" {\n").skip(1).filter_map(|rest| rest.split("\n}").next());
    let functions = blocks.flat_map(|block| block.split("fn ").skip(1)).filter_map(|function| {
        let (name, rest) = function.split_once('(')?;
        let args = rest.split(')').next()?;
        let types = args.split(',').filter_map(|arg| arg.split_once(':')).map(|(_, of)| rust_type(of));
        Some((name.trim().to_owned(), types.collect()))
    });
    functions.filter(|(name, _): &(String, _)| !name.starts_with("cu")).collect()
}

/// Functions that are defined with C linkage.
fn c_functions(code: &str) -> Signatures {
    let functions = code.split("extern \"C\" ").skip(1).filter_map(|rest| {
        let (head, rest) = rest.split_once('(')?;
        let name = head.split_whitespace().last()?.trim_start_matches('*');
        let args = rest.split(')').next()?;
        Some((name.to_owned(), args.split(',').filter(|arg| !arg.trim().is_empty()).map(c_type).collect()))
    });
    functions.collect()
}

/// Structs with the layout of C.
fn rust_structs(code: &str) -> Signatures {
    let structs = code.split("#[repr(C)]").skip(1).filter_map(|rest| {
        let (head, rest) = rest.split_once('{')?;
        let name = head.split("struct ").nth(1)?.trim().trim_end_matches("Ffi").to_owned();
        let fields = rest.split('}').next()?;
        let types =
            fields.split(",\n").filter_map(|field| field.split_once(": ")).map(|(_, of)| rust_type(of));
        Some((name, types.collect()))
    });
    structs.collect()
}

/// Structs of which nothing but fields is declared before the first function.
fn c_structs(code: &str) -> Signatures {
    let structs = code.split("struct ").skip(1).filter_map(|rest| {
        let (name, rest) = rest.split_once('{')?;
        let body = rest.split('}').next()?;
        let fields =
            body.split(';').take_while(|field| !field.contains('(')).filter(|field| !field.trim().is_empty());
        let types = fields.flat_map(|field| {
            let count = field.split(',').count();
            let of = c_type(field.split(',').next().unwrap_or(field));
            std::iter::repeat_n(of, count)
        });
        Some((name.trim().trim_end_matches("Ffi").to_owned(), types.collect()))
    });
    structs.filter(|(name, _): &(String, _)| name.chars().all(char::is_alphanumeric)).collect()
}

/// How a value of a type is passed: a pointer, a number of so many bytes, or a struct by name.
fn rust_type(text: &str) -> String {
    let text = text.trim();
    if text.starts_with('*') || matches!(text, "RawStream" | "sys::CUgraph") || text.starts_with("Option<") {
        return "pointer".into();
    }
    let plain = match text.trim_end_matches(',') {
        "c_int" | "i32" | "u32" | "c_uint" => "32 bits",
        "i64" | "u64" | "usize" => "64 bits",
        "f32" => "float",
        "f64" => "double",
        "u8" | "bool" => "8 bits",
        "u16" => "16 bits",
        other => other,
    };
    plain.into()
}

fn c_type(text: &str) -> String {
    if ["*", "[", "cudaStream_t", "cudaGraph_t"].iter().any(|part| text.contains(part)) {
        return "pointer".into();
    }
    let words: Vec<&str> =
        text.split_whitespace().filter(|word| *word != "const" && *word != "struct").collect();
    let plain = match words[..] {
        ["int" | "int32_t" | "unsigned" | "uint32_t" | "Type", ..] => "32 bits",
        ["int64_t" | "uint64_t" | "size_t", ..] => "64 bits",
        ["float", ..] => "float",
        ["double", ..] => "double",
        ["bool" | "uint8_t", ..] => "8 bits",
        ["uint16_t", ..] => "16 bits",
        [other, ..] => other,
        [] => "nothing",
    };
    plain.into()
}
