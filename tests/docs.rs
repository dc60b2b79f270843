//! The documents are true: every job in them plans, and every command runs.

use std::fs;
use std::path::{Path, PathBuf};

use crate::harness::{Finished, command, dataset, finish, job_folder, root, skip};

fn pages() -> Vec<PathBuf> {
    let docs = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages = docs.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let mut pages: Vec<PathBuf> = pages.chain([root().join("README.md")]).collect();
    pages.sort();
    pages
}

/// Fenced blocks of a language, each with its page and first line.
fn code_blocks(language: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap();
        let mut open: Option<(String, String)> = None;
        for (number, line) in text.lines().enumerate() {
            match (&mut open, line.trim_start().strip_prefix("```")) {
                (None, Some(info)) => {
                    open = Some((format!("{}:{} {info}", page.display(), number + 1), String::new()));
                }
                (Some(_), Some(_)) => found.extend(open.take()),
                (Some((_, body)), None) => *body += &format!("{line}\n"),
                (None, None) => {}
            }
        }
    }
    found.retain(|(place, _)| place.ends_with(&format!(" {language}")));
    found
}

/// The variable that jobs use for a published dataset, and its path in the dataset folder.
pub const DATASETS: [(&str, &str); 5] = [
    ("MNIST", "mnist"),
    ("FASHION_MNIST", "fashion-mnist"),
    ("TEXT", "tinyshakespeare/input.txt"),
    ("HOUSING", "tabular/california-housing"),
    ("SIGNS", "sign-language-digits/Dataset"),
];

/// The program, with the variables of the datasets.
fn trainer(folder: &Path, args: &[&str]) -> Finished {
    finish(command(folder, args).envs(DATASETS.map(|(name, path)| (name, dataset(path)))))
}

/// Templates for data of the reader's own, whose files are not here.
const OWN_DATA: [&str; 5] = ["chat", "csv", "images", "text", "tokens"];

/// The jobs in `configs/` whose data is here.
pub fn configs_with_data() -> Vec<PathBuf> {
    let configs = fs::read_dir(root().join("configs")).unwrap().map(|entry| entry.unwrap().path());
    let has_data = |config: &PathBuf| {
        if OWN_DATA.iter().any(|name| config.file_stem().is_some_and(|stem| stem == *name)) {
            return false;
        }
        let text = fs::read_to_string(config).unwrap();
        let lacks =
            |(name, path): &(&str, &str)| text.contains(&format!("${{{name}}}")) && !dataset(path).exists();
        let lacking = DATASETS.iter().find(|set| lacks(set));
        if let Some((_, path)) = lacking {
            skip(format!("{} needs `{path}` in the folder TRAINER_DATA names", config.display()));
        }
        lacking.is_none()
    };
    let mut configs: Vec<PathBuf> =
        configs.filter(|path| path.extension().is_some_and(|end| end == "toml")).filter(has_data).collect();
    configs.sort();
    assert!(configs.len() >= 2, "only {} configs", configs.len());
    configs
}

#[test]
fn every_config_is_planned() {
    for config in configs_with_data() {
        let plan = trainer(root(), &["plan", config.to_str().unwrap()]);
        assert_eq!(plan.code(), Some(0), "{}: {}", config.display(), plan.text());
    }
}

#[test]
fn every_job_in_the_documents_is_planned() {
    let jobs = code_blocks("toml");
    assert!(!jobs.is_empty());
    for (place, job) in jobs {
        let plan = trainer(job_folder(job).path(), &["plan", "job.toml"]);
        assert_eq!(plan.code(), Some(0), "{place}: {}", plan.text());
    }
}

/// Commands of this program in the documents, as typed after `trainer` or `cargo run --release --`. Training is cut
/// to two updates. Commands that need the reader's own file work because the test creates `job.toml` first.
#[test]
fn every_command_of_ours_in_the_documents_runs() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["configs", "docs"] {
        let to = folder.path().join(name);
        fs::create_dir(&to).unwrap();
        for entry in fs::read_dir(root().join(name)).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
    let mut seen = 0;
    for (place, block) in code_blocks("sh") {
        for (name, text) in heredoc_files(&block) {
            fs::write(folder.path().join(name), text).unwrap();
        }
        for line in block.lines().map(|line| line.split(" #").next().unwrap_or(line).trim()) {
            let ours = line.strip_prefix("trainer ").or_else(|| line.strip_prefix("cargo run --release -- "));
            let Some(arguments) = ours else { continue };
            // Shell syntax after the command is not tested.
            let arguments = arguments.split(['|', '>', ';', '&']).next().unwrap_or(arguments);
            let mut words: Vec<&str> = arguments.split_whitespace().collect();
            if words.first() == Some(&"fit") && !words.contains(&"--dry-run") {
                words.extend(["--max-steps", "2", "-q"]);
            }
            let job = folder.path().join("job.toml");
            if words.contains(&"-o") && job.exists() {
                fs::remove_file(&job).unwrap();
            } else if !job.exists() {
                fs::copy(root().join("configs/mlp.toml"), &job).unwrap();
            }
            let done = trainer(folder.path(), &words);
            assert_eq!(done.code(), Some(0), "{place}: trainer {}\n{}", words.join(" "), done.text());
            seen += 1;
        }
    }
    assert!(seen >= 5, "only {seen} commands");
}

/// Files that a block creates with `cat > NAME <<'END'`.
fn heredoc_files(block: &str) -> Vec<(&str, String)> {
    let (mut made, mut lines) = (Vec::new(), block.lines());
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("cat > ").and_then(|rest| rest.strip_suffix(" <<'END'")) {
            let text = lines.by_ref().take_while(|line| *line != "END").map(|line| format!("{line}\n"));
            made.push((name, text.collect()));
        }
    }
    made
}

#[test]
fn the_two_commands_stand_in_the_readme() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    assert!(readme.contains("cargo run --release -- fit configs/quickstart.toml"));
    assert!(readme.contains("cargo test"));
    let ci = fs::read_to_string(root().join(".ci/run")).unwrap();
    assert!(ci.contains("cargo test"), "CI runs the README's own test command");
}

#[test]
fn every_template_is_a_config_and_every_config_a_template() {
    let listed = trainer(root(), &["init", "--list"]).expect(0).text();
    let listed: std::collections::BTreeSet<String> = listed
        .lines()
        .filter_map(|line| line.strip_prefix("  ")?.split_whitespace().next())
        .map(str::to_owned)
        .collect();
    let configs = fs::read_dir(root().join("configs")).unwrap().map(|entry| entry.unwrap().path());
    let stems = configs.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned())).collect();
    assert_eq!(listed, stems);
}

/// The templates for data of the reader's own train on files of the names and formats that they state.
#[test]
fn templates_for_own_data_train_on_such_files() {
    let folder = tempfile::tempdir().unwrap();
    let rows: String =
        (0..200).map(|i| format!("{},{},{}\n", i % 7, ["red", "green"][i % 2], i % 3)).collect();
    let words: String = (0..2000).map(|i| ["the ", "cat ", "sat.\n"][i % 3]).collect();
    let chats: String = (0..60)
        .map(|i| {
            format!(
                "{{\"messages\": [{{\"role\": \"user\", \"content\": \"what is {i}?\"}}, {{\"role\": \"assistant\", \
                 \"content\": \"a number\"}}]}}\n"
            )
        })
        .collect();
    let ids = |n: u16| (0..n).flat_map(|i| (i % 300).to_le_bytes()).collect::<Vec<u8>>();
    let mut files: Vec<(String, Vec<u8>)> = vec![
        ("train.csv".into(), format!("size,color,target\n{rows}").into_bytes()),
        ("input.txt".into(), words.into_bytes()),
        ("chats.jsonl".into(), chats.into_bytes()),
        ("train.bin".into(), ids(5000)),
        ("val.bin".into(), ids(2000)),
    ];
    for i in 0..24 {
        let image = [&b"P5 20 20 255\n"[..], &[(i * 10) as u8; 400]].concat();
        files.push((format!("photos/{}/{i}.pgm", ["cat", "dog"][i % 2]), image));
    }
    crate::harness::write_files(folder.path(), &files);
    for template in OWN_DATA {
        let file = format!("{template}.toml");
        let said = trainer(folder.path(), &["init", template, "-o", &file]).expect(0).stdout;
        assert!(said.contains("set `train` in it"), "{said}");
        let first: String = fs::read_to_string(folder.path().join(&file)).unwrap().lines().take(6).collect();
        assert!(first.contains("Set `train`"), "{template}: {first}");
        // Language models are slow in a build without optimization; batch norm needs its whole group.
        let batch = if template == "images" { "train.batch_size=32" } else { "train.batch_size=4" };
        trainer(folder.path(), &["fit", &file, "-q", "--max-steps", "2", "--set", batch]).expect(0);
    }
}
