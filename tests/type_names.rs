//! A type name stands for one thing: no two files define types of the same name.

use std::collections::BTreeMap;

use crate::imports::product_files;

/// Files whose types stand in for those of a build with CUDA, and have their names.
const STAND_INS: [&str; 2] = ["no_cuda.rs", "no_gpu.rs"];

/// The type that a line defines. Associated types are indented, and have the name that their trait gives them.
fn defined_type(line: &str) -> Option<&str> {
    let code = line.trim_start();
    let code = match code.strip_prefix("pub(") {
        Some(scope) => scope.split_once(") ")?.1,
        None => code.strip_prefix("pub ").unwrap_or(code),
    };
    let (keyword, rest) = code.split_once(' ')?;
    let defines = match keyword {
        "struct" | "enum" | "union" | "trait" => true,
        "type" => !line.starts_with(' '),
        _ => false,
    };
    defines.then(|| rest.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default())
}

#[test]
fn no_type_name_is_used_for_two_things() {
    let files = product_files();
    let mut files_of: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (_, file, code) in
        files.iter().filter(|(_, file, _)| !STAND_INS.iter().any(|end| file.ends_with(end)))
    {
        for name in code.lines().filter_map(defined_type) {
            let files = files_of.entry(name).or_default();
            if files.last() != Some(&file.as_str()) {
                files.push(file);
            }
        }
    }
    assert!(files_of.len() > 1000, "only {} types were found", files_of.len());
    let twice: Vec<_> = files_of.iter().filter(|(_, files)| files.len() > 1).collect();
    assert!(twice.is_empty(), "{twice:#?}");
}

#[test]
fn definitions_are_found() {
    let code = "pub(in super::super) struct Plan<'a> {\n    pub enum Unit {\ntype Rows = u8;\n    type Item = u8;\npub fn f() {}";
    assert_eq!(code.lines().filter_map(defined_type).collect::<Vec<_>>(), ["Plan", "Unit", "Rows"]);
}
