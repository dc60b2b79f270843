//! Memory changes how a job runs, never its result, for every model: fifty updates with ample memory, and fifty under a
//! budget that forces smaller micro-batches and recomputation, with an OOM on the way, are the same experiment.

use std::path::Path;

use trainer::job::{Job, OomAction};
use trainer::planner::plan::PlanVerdict;
use trainer::train::setup::Setup;

use crate::harness::{FinalState, command, events, finish, in_parallel, job_folder, losses, named};

const UPDATES: usize = 50;

/// Relative tolerance of losses when additions run in another order.
const TOLERANCE: f64 = 1e-5;

/// The reservation that fails, some updates after the first.
const FAULT_ENV: &str = "TRAINER_FAULT_OOM";

/// Models small enough for fifty updates in seconds, with activations worth saving: name, `[model]`, `[data]`,
/// samples per update, the reservation that fails.
///
/// The deep networks with batch norm use a tiny learning rate. A GEMM of few rows adds in another order than one of
/// many; eighteen or more normalizations over a few values each, with a ReLU after every one, amplify that last bit
/// into a different gradient within some updates at a usual learning rate. For them the test proves that only that
/// bit differs; that results are bitwise identical under the same split, it proves all the same.
const MODELS: [(&str, &str, &str, usize, u64); 9] = [
    ("mlp", "hidden = [128, 128, 128, 128]\nactivation = 'gelu'\ndropout = 0.1", IMAGES, 1024, 900),
    ("cnn", "stages = [{ channels = 8 }, { channels = 16 }]\nhidden = [16]\ndropout = 0.1", IMAGES, 256, 900),
    ("gpt", "layers = 3\nheads = 2\nwidth = 32\ncontext = 32\ndropout = 0.1", TOKENS, 24, 1500),
    ("llama", "layers = 3\nheads = 2\nkv_heads = 1\nwidth = 32\nhidden = 64\ncontext = 32", TOKENS, 24, 1500),
    (
        "bert",
        "layers = 3\nheads = 2\nwidth = 32\nhidden = 64\ncontext = 32\ndropout = 0.1",
        LABELED_TOKENS,
        24,
        1500,
    ),
    ("vit", "patch = 4\nlayers = 3\nheads = 2\nwidth = 32\ndropout = 0.1", IMAGES, 48, 1500),
    ("resnet", "depth = 18\nstem = 'imagenet'\nnorm_group = 8", LARGE_IMAGES, 16, 1500),
    ("mobilenet", "width = 0.1\nstem = 'small'\nnorm_group = 8", LARGE_IMAGES, 16, 1500),
    (
        "layers",
        "layers = [{ kind = 'conv', channels = 8, padding = 1 }, { kind = 'batch_norm', group = 16 }, { kind = 'relu' }, \
         { kind = 'residual', layers = [{ kind = 'conv', channels = 8, padding = 1 }, { kind = 'gelu' }] }, \
         { kind = 'max_pool' }, { kind = 'dropout', p = 0.1 }, { kind = 'flatten' }]",
        IMAGES,
        128,
        900,
    ),
];

const IMAGES: &str = "kind = 'shapes'\nimage_size = 16";
const LARGE_IMAGES: &str = "kind = 'shapes'\nimage_size = 32";
const TOKENS: &str = "kind = 'text-synthetic'\nvocab = 32";
const LABELED_TOKENS: &str = "kind = 'text-synthetic'\nvocab = 32\nclasses = 4";

fn job(kind: usize) -> String {
    let (name, model, data, samples, _) = MODELS[kind];
    let tiny_steps = ["resnet", "mobilenet"].contains(&name);
    format!(
        "name = '{name}'\nseed = 3\n[model]\nkind = '{name}'\n{model}\n[data]\n{data}\ntrain_samples = {}\n\
         valid_samples = {samples}\nprefetch = '64KiB'\n[train]\nbatch_size = {samples}\nsteps = {UPDATES}\nclip_norm = 1.0\n\
         [optimizer]\n{}\n[log]\nevery_steps = 1\ntensorboard = false\n[checkpoint]\nkeep = 1\n",
        10 * samples + samples / 2,
        if tiny_steps { "kind = 'sgd'\nlr = 0.000001" } else { "kind = 'adamw'\nlr = 0.0003" },
    )
}

/// Settings under which the plan both splits and recomputes. If one of the two alone is always faster, settings that
/// force the one, and settings that force the other.
fn tight_settings(path: &Path) -> Vec<Vec<String>> {
    let job = Job::load(path, &[]).unwrap();
    let plan = |ram| Setup::new(job.clone(), ram).unwrap().plan(ram);
    let (most, least) = (plan(1 << 40).peak.ram_bytes, plan(1).peak.ram_bytes);
    let steps = 100;
    let both = (1..steps).map(|i| most - (most - least) * i / steps).find(|&ram| {
        let plan = plan(ram);
        let chosen = &plan.chosen;
        plan.verdict == PlanVerdict::FitsAfterShrink && chosen.accumulation_steps > 1 && chosen.recompute > 0
    });
    let ram = |bytes: u64| format!("memory.ram={bytes}B");
    let only = |rung: &str| format!("memory.on_oom=[\"{rung}\"]");
    if let Some(bytes) = both {
        return vec![vec![ram(bytes)]];
    }
    let mut settings = vec![vec![ram((most + least) / 2), only("shrink")]];
    let mut job = job.clone();
    job.memory.on_oom = vec![OomAction::Recompute];
    // If the peak is not in saved activations, no budget forces recomputation; the OOM below does.
    if Setup::new(job, most - 1).unwrap().plan(most - 1).verdict != PlanVerdict::DoesNotFit {
        settings.push(vec![ram(most - 1), only("recompute")]);
    }
    settings
}

/// What a run leaves: losses, samples, weights and optimizer state, and its OOMs.
struct RunArtifacts {
    losses: Vec<f64>,
    end: FinalState,
    ooms: Vec<u64>,
    planned: (u64, u64),
}

fn run(folder: &Path, name: &str, fault: Option<u64>, sets: &[String]) -> RunArtifacts {
    let mut command = command(folder, &["fit", "job.toml", "-q", "--run-dir", name]);
    command.args(sets.iter().flat_map(|set| ["--set", set]));
    finish(command.envs(fault.map(|ask| (FAULT_ENV, ask.to_string())))).expect(0);
    let run = folder.join(name);
    let events = events(&run);
    let chosen = &named(&events, "planned")[0]["plan"]["chosen"];
    RunArtifacts {
        losses: losses(&events),
        end: FinalState::of(&run),
        ooms: named(&events, "oom").iter().map(|oom| oom["step"].as_u64().unwrap()).collect(),
        planned: (chosen["accumulation_steps"].as_u64().unwrap(), chosen["recompute"].as_u64().unwrap()),
    }
}

fn max_loss_difference(a: &RunArtifacts, b: &RunArtifacts) -> f64 {
    assert_eq!((a.losses.len(), b.losses.len()), (UPDATES, UPDATES));
    a.losses.iter().zip(&b.losses).map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max)
}

/// Runs a model with ample memory, under tight memory, and with one split throughout. Returns how far the losses under
/// tight memory are from those with ample memory.
fn compare_under_tight_memory(kind: usize) -> f64 {
    let (name, _, _, _, fault) = MODELS[kind];
    let folder = job_folder(job(kind));
    let path = folder.path().join("job.toml");
    let ample = run(folder.path(), "ample", None, &[]);
    assert!(ample.ooms.is_empty() && ample.planned == (1, 0), "{name}: ample is ample");
    let on_the_way = |left: &RunArtifacts| {
        !left.ooms.is_empty() && left.ooms.iter().all(|&s| 0 < s && s < UPDATES as u64 - 1)
    };
    let (mut split, mut apart) = (false, 0.0f64);
    for (i, sets) in tight_settings(&path).iter().enumerate() {
        let tight = run(folder.path(), &format!("tight-{i}"), (i == 0).then_some(fault), sets);
        split |= tight.planned.0 > 1;
        assert!(i > 0 || on_the_way(&tight), "{name}: an OOM on the way, {:?}", tight.ooms);
        let digest = |run: &RunArtifacts| run.end.samples_digest.clone();
        assert_eq!(digest(&tight), digest(&ample), "{name}: the same samples in the same order");
        apart = apart.max(max_loss_difference(&ample, &tight));
    }
    assert!(split, "{name}: the budget splits updates");

    // The same split from start to end gives the same bits, despite an OOM and recomputation.
    let same = run(folder.path(), "same", Some(fault), &["memory.on_oom=[\"recompute\"]".into()]);
    assert!(on_the_way(&same), "{name}: an OOM on the way, {:?}", same.ooms);
    assert_eq!(same.losses, ample.losses, "{name}");
    assert_eq!(same.end.difference(&ample.end), None, "{name}: weights and optimizer state to the bit");
    apart
}

#[test]
fn fifty_updates_are_the_same_experiment_in_any_memory() {
    let only = std::env::var("TRAINER_MEMORY_INVARIANCE_ONLY").unwrap_or_default();
    let kinds: Vec<usize> = (0..MODELS.len()).filter(|kind| MODELS[*kind].0.contains(&only)).collect();
    let differences = in_parallel(2, &kinds, |kind| (MODELS[*kind].0, compare_under_tight_memory(*kind)));
    for (name, apart) in differences {
        println!("{name}: losses differ by {apart:.1e} at most");
        assert!(apart <= TOLERANCE, "{name}: losses differ by {apart:.1e}");
    }
}
