//! The same for what data takes: padding, images, archives, tables, texts and long records.

use std::fs;
use std::path::Path;

use super::{MAX_OVERESTIMATE_SMALL, fit, table};
use crate::fixtures;
use crate::harness::{finish, gzip, job_folder, measured_command, tar, write_files};

/// Padded samples are planned at the length of the longest, and shorter micro-batches take less. The tokenizer's pass
/// over the files is not part of it.
#[cfg(target_os = "linux")]
#[test]
fn padded_samples_stay_within_the_plan_of_the_longest() {
    for (model, data) in [
        ("kind = 'gpt'\nlayers = 4\nheads = 4\nwidth = 128\ncontext = 256", "buckets = [32, 64, 128, 200]"),
        ("kind = 'bert'\nlayers = 4\nheads = 4\nwidth = 128\nhidden = 512\ncontext = 256", "label = 'class'"),
    ] {
        let record = |i: usize| {
            let text = "abcdefgh".repeat([2, 7, 12, 25][i % 4]);
            format!("{}\n", serde_json::json!({ "text": text, "class": i % 2 }))
        };
        let job = format!(
            "[model]\n{model}\n[data]\nkind = 'jsonl'\ntrain = ['a.jsonl']\nvalid = ['a.jsonl']\ntokens = 'bytes'\n{data}\n\
             prefetch = '1MiB'\n[train]\nbatch_size = 8\nepochs = 1\n[optimizer]\nkind = 'adamw'\nlr = 0.001\n"
        );
        let folder = job_folder(job);
        fs::write(folder.path().join("a.jsonl"), (0..16).map(record).collect::<String>()).unwrap();
        let seen = fit(folder.path(), &[], model);
        println!("{}", table(&[(model.replace('\n', " "), seen.clone())]));
        assert_eq!(seen.violation(), None, "{seen:?}");
    }
}

/// A single-color PNG of (height, width).
fn png([height, width]: [usize; 2], value: u8) -> Vec<u8> {
    let pixels = vec![value; 3 * height * width];
    fixtures::png([height, width], png::ColorType::Rgb, png::BitDepth::Eight, &pixels)
}

/// Writes a Parquet file of numbers with pages of up to 1 MiB: `columns` columns besides `class`, in one row group.
fn write_parquet(path: &Path, columns: usize, rows: usize) {
    use parquet::data_type::DoubleType;
    use parquet::file::{properties::WriterProperties, writer::SerializedFileWriter};
    let fields: String = (0..columns).map(|i| format!("required double c{i}; ")).collect();
    let schema = format!("message table {{ {fields} required double class; }}");
    let schema = parquet::schema::parser::parse_message_type(&schema).unwrap();
    let properties = WriterProperties::builder()
        .set_dictionary_enabled(false)
        .set_max_row_group_row_count(Some(rows))
        .set_data_page_row_count_limit(rows)
        .build();
    let file = fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema.into(), properties.into()).unwrap();
    let mut group = writer.next_row_group().unwrap();
    for column in 0..=columns {
        let value = |row: usize| match column == columns {
            true => (row % 2) as f64,
            false => (row * 7919 + column * 104_729) as f64 % 1.37,
        };
        let values: Vec<f64> = (0..rows).map(value).collect();
        let mut writer = group.next_column().unwrap().unwrap();
        writer.typed::<DoubleType>().write_batch(&values, None, None).unwrap();
        writer.close().unwrap();
    }
    group.close().unwrap();
    writer.close().unwrap();
}

/// Images in folders and compressed archives, tables, and texts to tokenize: the plan bounds data preparation too,
/// on the first run and on later ones.
#[cfg(target_os = "linux")]
#[test]
fn data_that_is_prepared_stays_within_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    // One is much larger than the others.
    let image = |i: usize| png(if i == 5 { [1500, 1500] } else { [40 + i, 50] }, i as u8 * 9);
    let images: Vec<_> = (0..24).map(|i| (format!("{}/{i}.png", ["ant", "bee"][i % 2]), image(i))).collect();
    write_files(&path.join("images"), &images);
    fs::write(path.join("a.tar.gz"), gzip(&tar(&images))).unwrap();
    let row = |i: usize| format!("{},{},{}\n", i % 7, (i * 37 % 100) as f64 / 7.0, ["no", "yes"][i % 2]);
    fs::write(path.join("a.csv"), "a,b,class\n".to_owned() + &(0..5000).map(row).collect::<String>())
        .unwrap();
    write_parquet(&path.join("wide.parquet"), 10_000, 50);
    write_parquet(&path.join("long.parquet"), 160, 135_000);
    fs::write(path.join("a.txt"), "some words and others, again and again. ".repeat(20_000)).unwrap();
    let cnn = "kind = 'cnn'\nstages = [{ channels = 8 }]\nhidden = [16]";
    let gpt = "kind = 'gpt'\nlayers = 2\nheads = 2\nwidth = 32\ncontext = 64";
    let mlp = "kind = 'mlp'\nhidden = [32]";
    for (name, model, data) in [
        ("folder", cnn, "kind = 'images'\ntrain = ['images']\nimage_size = 32\nvalid_fraction = 0.3"),
        ("archive", cnn, "kind = 'images'\ntrain = ['a.tar.gz']\nimage_size = 32\nvalid_fraction = 0.3"),
        ("table", mlp, "kind = 'csv'\ntrain = ['a.csv']\ntarget = 'class'"),
        ("wide table", mlp, "kind = 'parquet'\ntrain = ['wide.parquet']\ntarget = 'class'"),
        // More rows than the buffer has room for, so that training and evaluation read the file at the same time.
        (
            "long table",
            mlp,
            "kind = 'parquet'\ntrain = ['long.parquet']\ntarget = 'class'\nshuffle_buffer = '4MiB'",
        ),
        ("characters", gpt, "kind = 'text'\ntrain = ['a.txt']\ntokens = 'characters'\nvalid_fraction = 0.01"),
    ] {
        let job = format!(
            "[model]\n{model}\n[data]\n{data}\nprefetch = '1MiB'\n[train]\nbatch_size = 4\nsteps = 4\n[optimizer]\n\
             kind = 'adamw'\nlr = 0.001\n"
        );
        fs::write(path.join("job.toml"), job).unwrap();
        for time in ["first", "second"] {
            let seen = fit(path, &[], name);
            println!("{}", table(&[(format!("{name}, {time}"), seen.clone())]));
            assert_eq!(seen.violation(), None, "{name}, {time}: {seen:?}");
            fs::remove_dir_all(path.join("run")).unwrap();
        }
    }
}

/// Readers hold the longest row of a table, and of JSON also the parsed record: the plan has both.
#[cfg(target_os = "linux")]
#[test]
fn long_rows_and_records_stay_within_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let fields = |i: usize| -> String {
        (0..50_000).map(|field| format!("\"f{field}\": {}.25, ", (i * 31 + field) % 97)).collect()
    };
    let wide: String = (0..12).map(|i| format!("{{{}\"y\": {i}.5}}\n", fields(i))).collect();
    fs::write(path.join("wide.json"), wide).unwrap();
    // Every letter is six bytes in the file and two in memory.
    let escaped = "\\u00e9".repeat(1 << 20);
    let record = |i: usize| format!("{{\"a\": {}, \"s\": \"{escaped}\", \"y\": {i}.5}}\n", i % 3);
    fs::write(path.join("escaped.json"), (0..6).map(record).collect::<String>()).unwrap();
    let long = "x".repeat(14 << 20);
    for (name, quote) in [("long.csv", ""), ("quoted.csv", "\"")] {
        let row = |i: usize| {
            let text = if i == 15 || i == 17 { &long[..] } else { "short" };
            format!("{},{quote}{text}{quote},{i}.5\n", i % 3)
        };
        fs::write(path.join(name), "a,s,y\n".to_owned() + &(0..20).map(row).collect::<String>()).unwrap();
    }
    for (name, data) in [
        ("wide.json", "kind = 'json'"),
        ("escaped.json", "kind = 'json'\nignore = ['s']"),
        ("long.csv", "kind = 'csv'\nignore = ['s']"),
        ("quoted.csv", "kind = 'csv'\nignore = ['s']"),
    ] {
        let job = format!(
            "[model]\nkind = 'mlp'\nhidden = [8]\n[data]\n{data}\ntrain = ['{name}']\ntarget = 'y'\ntask = 'values'\n\
             workers = 2\nprefetch = '1MiB'\n[train]\nbatch_size = 4\nsteps = 20\n[optimizer]\nkind = 'adamw'\n\
             lr = 0.001\n"
        );
        fs::write(path.join("job.toml"), job).unwrap();
        for time in ["first", "second"] {
            let seen = fit(path, &[], name);
            println!("{}", table(&[(format!("{name}, {time}"), seen.clone())]));
            assert!(seen.planned - seen.process >= seen.measured, "{name}, {time}: {seen:?}");
            assert!(seen.planned >= seen.resident, "{name}, {time}: {seen:?}");
            // Every thread may hold the longest row, and training and evaluation read at the same time; here they do not
            // always.
            let most = seen.measured_peak() * 3 / 2 + MAX_OVERESTIMATE_SMALL;
            assert!(time == "first" || seen.planned <= most, "{name}, {time}: {seen:?}");
            fs::remove_dir_all(path.join("run")).unwrap();
        }
    }
}

/// An image that does not fit fails the run before it starts, with its name and two remedies; with either the job
/// runs.
#[cfg(target_os = "linux")]
#[test]
fn an_image_that_does_not_fit_is_named_with_its_remedies() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let image = |i: usize| png(if i == 7 { [5000, 5000] } else { [32, 32] }, i as u8);
    let images: Vec<_> = (0..20).map(|i| (format!("{}/{i}.png", ["ant", "bee"][i % 2]), image(i))).collect();
    write_files(&path.join("images"), &images);
    let job = "[model]\nkind = 'mlp'\nhidden = [8]\n[data]\nkind = 'images'\ntrain = ['images']\nimage_size = 8\n\
               valid_fraction = 0.2\non_bad_record = 'skip'\n[train]\nbatch_size = 4\nepochs = 1\n";
    fs::write(path.join("job.toml"), job).unwrap();
    let with = |sets: &[&str]| {
        let args =
            [&["fit", "job.toml", "-q", "--run-dir", "run", "--set", "memory.ram=64MiB"], sets].concat();
        let finished = finish(&mut measured_command(path, &args));
        drop(fs::remove_dir_all(path.join("run")));
        finished
    };
    let said = with(&[]).expect(3).stderr;
    assert!(said.contains("7.png") && said.contains("memory.ram") && said.contains("max_pixels"), "{said}");
    with(&["--set", "memory.ram=256MiB"]).expect(0);
    with(&["--set", "data.max_pixels=24999999"]).expect(0);
}
