//! Jobs and commands through the binary: exit code, stdout and stderr together, compared with `tests/snapshots`.
//! `TRAINER_UPDATE_SNAPSHOTS=1 cargo test` rewrites them.

use std::fs;
use std::path::{Path, PathBuf};

use clap::CommandFactory;
use proptest::prelude::*;
use trainer::cli::Cli;
use trainer::job::{self, Job};

use crate::harness::{Finished, assert_snapshot, command, finish, job_folder, reproducible_command, root};

const GOOD: &str = "\
name = \"tiny\"

[model]
kind = \"mlp\"
hidden = [32]

[data]
kind = \"shapes\"

[train]
epochs = 2
";

fn trainer(folder: &Path, args: &[&str]) -> Finished {
    finish(reproducible_command(folder, args).env_remove("NO_COLOR").env("COLUMNS", "100"))
}

/// Runs `args` and compares everything visible with the snapshot `name`.
fn snapshot(name: &str, job: impl AsRef<[u8]>, args: &[&str]) {
    let done = trainer(job_folder(job).path(), args);
    let (args, code) = (args.join(" "), done.code().unwrap());
    let seen =
        format!("$ trainer {args}\nexit code {code}\n--- stdout\n{}--- stderr\n{}", done.stdout, done.stderr);
    assert_snapshot(&root().join("tests/snapshots").join(format!("{name}.txt")), &seen);
}

fn check(name: &str, job: &str) {
    snapshot(name, job, &["check", "job.toml"]);
}

#[test]
fn a_good_job_is_summed_up() {
    check("good", GOOD);
    snapshot("good_json", GOOD, &["check", "job.toml", "--json"]);
    snapshot("good_verbose", GOOD, &["check", "job.toml", "-v"]);
}

#[test]
fn a_plan_is_a_verdict_with_reasons() {
    snapshot("plan_fits", GOOD, &["plan", "job.toml", "--ram", "1GiB"]);
    snapshot("plan_shrunk", GOOD, &["plan", "job.toml", "--ram", "3068KiB"]);
    snapshot("plan_strict", GOOD, &["plan", "job.toml", "--ram", "3068KiB", "--strict", "-q"]);
    snapshot("plan_does_not_fit", GOOD, &["plan", "job.toml", "--ram", "1MiB"]);
    snapshot("plan_forbidden", GOOD, &["plan", "job.toml", "--ram", "3068KiB", "--set", "memory.on_oom=[]"]);
    snapshot("plan_gpu", GOOD, &["plan", "job.toml", "--vram", "33722KiB", "--ram", "16MiB", "-v"]);
    snapshot("plan_json", GOOD, &["plan", "job.toml", "--ram", "3068KiB", "--json"]);
    snapshot("plan_frozen_without_lock", GOOD, &["plan", "job.toml", "--ram", "3068KiB", "--frozen"]);
    snapshot("plan_no_gpu", GOOD, &["plan", "job.toml", "--vram", "0B"]);
}

#[test]
fn every_independent_mistake_is_reported_at_once() {
    let job = "nam = \"x\"\nseed = -1\n\n[model]\nkind = \"mlp\"\nhiden = [512, 256]\nactivation = \"rleu\"\n\
               dropout = 1.0\n\n[data]\nkind = \"shapes\"\nimage_size = \"28\"\nprefetch = \"8 gigs\"\n\n\
               [train]\nbatch_size = 0\nlr = 0.1\n\n[chekpoint]\nkeep = 3\n";
    check("many_mistakes", job);
    snapshot("many_mistakes_json", job, &["check", "job.toml", "--json"]);
}

#[test]
fn keys_of_another_kind_are_named() {
    check("other_kind", &format!("{GOOD}[optimizer]\nkind = \"adamw\"\nmomentum = 0.9\n"));
}

#[test]
fn renamed_keys_are_named() {
    let job = GOOD.replace("kind = \"shapes\"", "kind = \"csv\"\ntrain = [\"x.csv\"]\nvalid_share = 0.2");
    check("renamed_key", &format!("{job}[schedule]\nkind = \"onecycle\"\nwarmup_share = 0.2\n"));
}

#[test]
fn a_kind_is_missing_unknown_or_no_string() {
    check("kind_missing", "[model]\nhidden = [3]\nwidth = 3\n[data]\n[train]\nsteps = 1\n");
    check("kind_unknown", &GOOD.replace("\"mlp\"", "\"resnett\""));
    check("kind_no_string", &GOOD.replace("\"mlp\"", "7"));
}

#[test]
fn tables_are_missing() {
    check("empty", "");
    check("table_is_no_table", "model = 3\ndata = []\n[train]\nsteps = 1\n");
}

#[test]
fn contradictions() {
    check("both_lengths", &format!("{GOOD}steps = 10\n"));
    check("no_length", &GOOD.replace("epochs = 2\n", ""));
    let job = GOOD.replace("epochs = 2", "steps = 10")
        + "[schedule]\nkind = \"cosine\"\nwarmup_steps = 100\n\
           [optimizer]\nkind = \"sgd\"\nnesterov = true\n[checkpoint]\nbest = \"valid.top5\"\n\
           [eval]\nmetrics = [\"accuracy\"]\n";
    check("contradictions", &job);
    let labels =
        "kind = \"csv\"\ntrain = [\"x.csv\"]\ntarget = \"y\"\ntask = \"values\"\nlabel_separator = \"\"";
    check("label_separator", &GOOD.replace("kind = \"shapes\"", labels));
}

#[test]
fn values_that_cannot_be_rounded_are_named() {
    let gpt = "[model]\nkind = \"gpt\"\n[data]\nkind = \"text\"\ntrain = \"x.txt\"\n[train]\nsteps = 10\n";
    check("quantize_kind", &format!("{gpt}[quantize]\ntraining = true\nbegin_step = 20\n"));
    check("quantize_off", &format!("{GOOD}[quantize]\nbegin_step = 20\n"));
    check("quantize_synonyms", &format!("{GOOD}[qat]\nquant_delay = 20\n"));
}

#[test]
fn a_loss_or_a_metric_of_another_task_is_named() {
    check("metric_of_another_task", &format!("{GOOD}[eval]\nmetrics = [\"accuracy\", \"rmse\"]\n"));
    check(
        "metric_unknown",
        &format!("{GOOD}[eval]\nmetrics = [\"f2\"]\n[checkpoint]\nbest = \"valid.f2\"\n"),
    );
    check("loss_of_another_task", &format!("{GOOD}loss = \"bce\"\n"));
    check("focal_gamma", &format!("{GOOD}loss = \"focal\"\nfocal_gamma = -1\n"));
}

#[test]
fn patterns_match_parameters() {
    check("freeze_no_match", &format!("{GOOD}freeze = [\"layer.0.*\", \"!*.bias\"]\n"));
    snapshot("freeze_no_match_plan", format!("{GOOD}freeze = \"layer.0\"\n"), &["plan", "job.toml"]);
    check("freeze_everything", &format!("{GOOD}freeze = \"*\"\n"));
    check("freeze_random", &format!("{GOOD}freeze = \"layers.0\"\n"));
    check("freeze_no_pattern", &format!("{GOOD}freeze = [\"layers.[0\"]\n"));
    check("groups_no_match", &format!("{GOOD}[[train.groups]]\nparams = \"head\"\nlr_scale = 10\n"));
    check("groups_mistakes", &format!("{GOOD}[[train.groups]]\nparam = \"*\"\nlr_scale = 0\n"));
    let job = format!("{GOOD}freeze = [\"*\", \"!layers.1\"]\n");
    snapshot("plan_with_frozen_parameters", job, &["plan", "job.toml", "--ram", "1GiB"]);
}

#[test]
fn pruning_that_cannot_be() {
    let prune = |keys: &str| format!("{GOOD}[prune]\n{keys}\n");
    check("prune_backwards", &prune("initial = 0.9\nfinal = 0.8\nbegin_step = 100\nend_step = 50"));
    check("prune_constant", &prune("schedule = \"constant\"\ninitial = 0.1\nfinal = 0.5\nend_step = 9"));
    check("prune_range", &prune("initial = -0.1\nfinal = 1.0\nend_step = 0\npower = 0\nscope = \"layer\""));
    check("prune_two_of_four", &prune("structure = \"2:4\"\nfinal = 0.8"));
    check("prune_no_end", &prune("final = 0.8"));
    check("prune_no_match", &prune("final = 0.8\nend_step = 50\nskip = [\"layers.1\", \"layer.0\"]"));
    check("prune_nothing", &prune("final = 0.8\nend_step = 50\nskip = \"*.weight\""));
    let units = "final = 0.5\nend_step = 50\nstructure";
    check("prune_no_heads", &prune(&format!("{units} = \"heads\"\nscope = \"global\"")));
    check("prune_no_channels", &prune(&format!("{units} = \"channels\"\nskip = \"layers.?\"")));
    check("prune_channels", &prune(&format!("{units} = \"channels\"")));
    check(
        "prune_channels_and_ranks",
        &format!("{}[lowrank]\nrank = 4\n", prune(&format!("{units} = \"channels\""))),
    );
    check("prune_kept", &prune("kept = { \"layers.0\" = 0 }"));
    check("prune_kept_of_another", &prune("kept = { \"layer.0\" = 4 }"));
    check("prune_cut_short", &prune("initial = 0.5\nfinal = 0.8\nend_step = 5000"));
    check("prune_after_the_end", &prune("final = 0.8\nend_step = 50").replace("epochs = 2", "steps = 20"));
}

#[test]
fn teachers_that_cannot_be() {
    check("distill_range", &format!("{GOOD}[distill]\ntemperature = 0\nweight = 1.5\n"));
    let stored = "[distill]\nteacher = \"run\"\nlogits = \"stored\"\n";
    check("distill_augmented", &format!("{GOOD}[data.augment]\nhorizontal_flip = 0.5\n\n{stored}"));
    let text =
        "[model]\nkind = \"gpt\"\n\n[data]\nkind = \"text\"\ntrain = \"a.txt\"\n\n[train]\nepochs = 1\n\n";
    check("distill_windows", &format!("{text}{stored}"));
    check("distill_top_k", &format!("{GOOD}[distill]\nteacher = \"run\"\ntop_k = 4\n"));
}

#[test]
fn splits_that_contradict_each_other() {
    let table = |keys: &str| {
        format!(
            "[model]\nkind = \"mlp\"\n\n[data]\nkind = \"csv\"\ntrain = \"a.csv\"\ntarget = \"y\"\n{keys}\n\n[train]\nepochs = 1\n"
        )
    };
    check("fold_beyond", &table("fold = \"6/5\""));
    check("fold_zero", &table("fold = \"0/5\""));
    check("fold_and_valid", &table("fold = \"2/5\"\nvalid = \"b.csv\"\nvalid_fraction = 0.2"));
    check("split_fractions", &table("valid_fraction = 0.5\ntest_fraction = 0.5"));
    check(
        "split_and_group",
        &table("test = \"b.csv\"\ntest_fraction = 0.1\nsplit = \"last\"\ngroup = \"y\""),
    );
    check("split_without_effect", &table("valid = \"b.csv\"\nsplit = \"stratified\""));
    let tokens = "[model]\nkind = \"gpt\"\n\n[data]\nkind = \"tokens\"\ntrain = \"a.bin\"\ngroup = \"user\"\n\n[train]\nepochs = 1\n";
    check("group_of_tokens", tokens);
}

#[test]
fn lists_are_checked_item_by_item() {
    let job = "[model]\nkind = \"cnn\"\nhidden = [128, \"x\", 0]\n\
               stages = [{ channels = 8 }, { kernel = 3, chanels = 8 }]\n\
               [data]\nkind = \"shapes\"\n[train]\nepochs = 1\n\
               [optimizer]\nkind = \"adamw\"\nbetas = [0.9]\nlr = nan\n\
               [memory]\non_oom = [\"shrink\", \"shrink\"]\nheadroom = \"auto\"\n";
    check("lists", job);
}

#[test]
fn what_is_not_toml_shows_the_place() {
    check("syntax", "[model\nkind = \"mlp\"\n\n[train]\nepochs = \n");
    check("duplicate_key", &format!("{GOOD}epochs = 3\n"));
    check(
        "tabs_wide_characters_crlf",
        "[model]\r\n\tkind = \"\u{4f60}\u{597d}\" # \u{1f980}\r\n[data]\r\n\tknd = 1",
    );
}

#[test]
fn what_is_no_job_file_is_refused() {
    snapshot("missing_file", GOOD, &["check", "nothing.toml"]);
    snapshot("folder", GOOD, &["check", "."]);
    snapshot("not_utf8", b"name = \"a\xff\"\n", &["check", "job.toml"]);
    snapshot("too_large", vec![b'#'; (1 << 20) + 1], &["check", "job.toml"]);
}

#[test]
fn sets_are_typed_by_the_schema() {
    let sets = [
        "train.steps=7",
        "name=run-1",
        "optimizer.kind=sgd",
        "optimizer.lr=1",
        "model.hidden=[8, 9]",
        "memory.ram=2GiB",
        "data.shuffle=false",
    ];
    let args: Vec<&str> = sets.iter().flat_map(|s| ["--set", s]).collect();
    snapshot("sets", GOOD, &[&["check", "job.toml", "-v"], &args[..]].concat());
}

#[test]
fn a_wrong_set_is_shown_as_typed() {
    for (name, set) in [
        ("set_unknown_key", "model.hiden=[3]"),
        ("set_wrong_type", "train.batch_size=many"),
        ("set_out_of_range", "train.batch_size=0"),
        ("set_without_value", "train.batch_size"),
        ("set_empty_key", "train..x=1"),
        ("set_broken_list", "model.hidden=[3,"),
        ("set_below_a_value", "name.x=1"),
    ] {
        snapshot(name, GOOD, &["check", "job.toml", "--set", set]);
    }
}

#[test]
fn usage() {
    snapshot("no_arguments", "", &[]);
    snapshot("unknown_command", "", &["train"]);
    snapshot("unknown_command_json", "", &["train", "--json"]);
    snapshot("flag_is_a_key", GOOD, &["fit", "job.toml", "--epochs", "3"]);
    snapshot("flag_is_a_key_with_a_list", GOOD, &["fit", "job.toml", "--hidden=[8, 9]"]);
    snapshot("flag_with_underscores", GOOD, &["fit", "job.toml", "--max_steps", "3"]);
    snapshot("flag_of_other_tools", GOOD, &["fit", "job.toml", "--gpus", "2"]);
    snapshot("unknown_device", "", &["probe", "--device", "gpu"]);
    snapshot("help", "", &["--help"]);
    for command in Cli::command().get_subcommands() {
        let name = command.get_name();
        snapshot(&format!("help_{name}"), "", &[name, "--help"]);
    }
}

#[test]
#[cfg(not(feature = "cuda"))]
fn cuda_without_its_feature_is_bad_usage() {
    snapshot("no_cuda", GOOD, &["check", "job.toml", "--device", "cuda:1"]);
}

#[test]
fn color_is_asked_for() {
    snapshot("color", "name = 3\n", &["check", "job.toml", "--color", "always"]);
}

#[test]
fn init_writes_a_job_that_checks_and_never_overwrites() {
    let folder = job_folder("mine");
    snapshot("init_list", "", &["init", "--list"]);
    snapshot("init_unknown", "", &["init", "table"]);
    snapshot("init_similar", "", &["init", "image", "-o", "new.toml"]);
    snapshot("init_exists", "mine", &["init", "-o", "job.toml"]);
    for template in ["quickstart", "mlp"] {
        let file = format!("{template}.toml");
        trainer(folder.path(), &["init", template, "-o", &file]).expect(0);
        trainer(folder.path(), &["check", &file]).expect(0);
        let printed = trainer(folder.path(), &["init", template]).stdout;
        assert_eq!(printed, fs::read_to_string(folder.path().join(&file)).unwrap());
    }
}

#[test]
fn completions_and_the_probe_need_no_job() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        assert!(trainer(root(), &["completions", shell]).expect(0).stdout.contains("resume"), "{shell}");
    }
    let document = trainer(root(), &["probe", "--json"]).json();
    assert!(document["usable_bytes"].as_u64().is_some_and(|b| b > 0), "{document:#}");
    assert!(document["host"]["total"].as_u64().is_some_and(|b| b > 0), "{document:#}");
}

#[test]
#[cfg(unix)]
fn a_reader_that_goes_away_is_no_error() {
    use std::os::fd::OwnedFd;
    for args in [&["schema"][..], &["completions", "bash"], &["init"], &["probe"], &["--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let done = finish(command(root(), args).stdout(OwnedFd::from(writer))).expect(0);
        assert!(done.stderr.is_empty(), "{args:?}: {done:?}");
    }
}

#[test]
fn every_config_loads_and_its_resolved_job_is_the_same_job() {
    let configs = fs::read_dir(root().join("configs")).unwrap().map(|entry| entry.unwrap().path());
    let configs: Vec<PathBuf> =
        configs.filter(|path| path.extension().is_some_and(|e| e == "toml")).collect();
    assert!(configs.len() >= 2);
    for path in configs {
        // Substitute the environment variables; whether the files exist does not matter here.
        let text = ["MNIST", "FASHION_MNIST", "TEXT", "SIGNS", "HOUSING"]
            .iter()
            .fold(fs::read_to_string(&path).unwrap(), |text, name| {
                text.replace(&format!("${{{name}}}"), "/x")
            });
        let job = Job::parse(&text, &path, &[]).unwrap_or_else(|e| panic!("{e}"));
        let again = Job::parse(&job.to_toml(), Path::new("/elsewhere/other.toml"), &[]);
        assert_eq!(again.unwrap_or_else(|e| panic!("{e}\n{}", job.to_toml())), job);
    }
}

#[test]
fn the_reference_page_is_fresh() {
    assert_snapshot(&root().join("docs/job.md"), &job::job_markdown());
}

/// A change to a job's text.
#[derive(Clone, Debug)]
enum Mutation {
    FlipByte(usize, u8),
    DropLine(usize),
    SwapTokens(usize, usize),
    DoubleLine(usize),
    Cut(usize),
}

fn mutate(text: &mut Vec<u8>, mutation: &Mutation) {
    let len = text.len().max(1);
    let split = |text: &[u8], by: u8| text.split(|b| *b == by).map(<[u8]>::to_vec).collect::<Vec<_>>();
    match *mutation {
        Mutation::FlipByte(at, bits) => text.iter_mut().skip(at % len).take(1).for_each(|b| *b ^= bits),
        Mutation::DropLine(at) | Mutation::DoubleLine(at) => {
            let mut lines = split(text, b'\n');
            let line = lines.remove(at % lines.len());
            if matches!(mutation, Mutation::DoubleLine(_)) {
                let to = at.wrapping_mul(31) % (lines.len() + 1);
                lines.insert(to, line.clone());
                lines.insert(to, line);
            }
            *text = lines.join(&b'\n');
        }
        Mutation::SwapTokens(a, b) => {
            let mut tokens = split(text, b' ');
            let n = tokens.len();
            tokens.swap(a % n, b % n);
            *text = tokens.join(&b' ');
        }
        Mutation::Cut(at) => text.truncate(at % len),
    }
}

fn mutation() -> impl Strategy<Value = Mutation> {
    prop_oneof![
        (any::<usize>(), 1u8..).prop_map(|(at, bits)| Mutation::FlipByte(at, bits)),
        any::<usize>().prop_map(Mutation::DropLine),
        any::<usize>().prop_map(Mutation::DoubleLine),
        any::<(usize, usize)>().prop_map(|(a, b)| Mutation::SwapTokens(a, b)),
        any::<usize>().prop_map(Mutation::Cut),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    /// A damaged job loads, or is refused with at least one message. It never panics, and a job that loads survives a
    /// round trip.
    #[test]
    fn a_damaged_job_never_panics(which in 0usize..2, mutations in prop::collection::vec(mutation(), 1..6)) {
        let path = root().join(["configs/quickstart.toml", "configs/mlp.toml"][which]);
        let mut text = fs::read(path).unwrap();
        mutations.iter().for_each(|m| mutate(&mut text, m));
        let folder = job_folder(&text);
        match Job::load(&folder.path().join("job.toml"), &[]) {
            Ok(job) => {
                let again = Job::parse(&job.to_toml(), Path::new("x.toml"), &[]);
                prop_assert_eq!(again.map_err(|e| TestCaseError::fail(e.to_string()))?, job);
            }
            Err(errors) => prop_assert!(!errors.0.is_empty() && errors.to_string().starts_with("error: ")),
        }
    }

    #[test]
    fn any_set_never_panics(set in "(\\PC|[a-z.=\\[\\]{}\"0-9]){0,40}", key in "(model|train|name|data)[.a-z=]{0,12}") {
        for set in [set.clone(), format!("{key}={set}")] {
            if let Err(errors) = Job::parse(GOOD, Path::new("job.toml"), &[set]) {
                prop_assert!(errors.to_string().starts_with("error: "));
            }
        }
    }
}

/// Any path in a job or on the command line that is not a regular file is refused at once. Plainly opened, a FIFO
/// would block and `/dev/zero` would never end.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        path("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
    fs::write(path("a.txt"), "some text ".repeat(100)).unwrap();
    fs::write(path("a.jsonl"), r#"{"messages": [{"role": "user", "content": "Hi"}]}"#).unwrap();
    let gpt = "[model]\nkind = \"gpt\"\nlayers = 1\nwidth = 8\nheads = 1\ncontext = 8\n";
    let mlp = "[model]\nkind = \"mlp\"\nhidden = [4]\n";
    let image = "image_size = 8\n[model]\nkind = \"mlp\"\nhidden = [4]\n";
    for (special, kind) in [("fifo", "a pipe"), ("socket", "a socket"), ("/dev/zero", "a device")] {
        let special = if special.starts_with('/') { special.into() } else { path(special) };
        let special = special.display().to_string();
        let tar = path("images.tar");
        drop(fs::remove_file(&tar));
        std::os::unix::fs::symlink(&special, &tar).unwrap();
        let tar = tar.display();
        let sources = [
            format!("kind = \"csv\"\ntrain = [\"{special}\"]\ntarget = \"y\"\n{mlp}"),
            format!("kind = \"parquet\"\ntrain = [\"{special}\"]\ntarget = \"y\"\n{mlp}"),
            format!("kind = \"text\"\ntrain = [\"{special}\"]\n{gpt}"),
            format!("kind = \"text\"\ntrain = [\"a.txt\"]\ntokens = \"{special}\"\n{gpt}"),
            format!("kind = \"tokens\"\ntrain = [\"{special}\"]\nvocab = 9\n{gpt}"),
            format!("kind = \"jsonl\"\ntrain = [\"{special}\"]\ntokens = \"bytes\"\n{gpt}"),
            format!(
                "kind = \"jsonl\"\ntrain = [\"a.jsonl\"]\ntokens = \"bytes\"\nmessages = \"messages\"\ntemplate = \"{special}\"\n{gpt}"
            ),
            format!("kind = \"images\"\ntrain = [\"{tar}\"]\n{image}"),
            format!(
                "kind = \"idx\"\ntrain_images = \"{special}\"\ntrain_labels = \"{special}\"\nvalid_images = \"{special}\"\nvalid_labels = \"{special}\"\nclasses = 2\n{mlp}"
            ),
        ];
        for source in sources {
            fs::write(path("job.toml"), format!("[train]\nsteps = 1\nbatch_size = 1\n[data]\n{source}"))
                .unwrap();
            let done = trainer(folder.path(), &["check", "job.toml"]);
            assert!(!done.status.success() && done.stderr.contains(kind), "{source}\n{}", done.stderr);
        }
        let said = trainer(folder.path(), &["check", &special]).expect(2).stderr;
        assert!(said.contains(kind), "{said}");
    }
}
