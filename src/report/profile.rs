//! Renders the profile of a job: tables and hotspots for people, a trace for Chrome and Perfetto, stacks for a flame
//! graph.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::text::{self, AnsiStyle};
use super::{DisplayOptions, Verbosity};
use crate::base::Role;
use crate::base::units::counted;
use crate::graph::offload::CopySpeed;
use crate::job::OptimizerKind;
use crate::train::profile::{BlockOffload, KernelProfile, NodeProfile, Profile, TimelineSpan};

/// Nodes and blocks that the tables list without `--verbose`, the slowest first.
const MAX_LISTED: usize = 12;

/// Fraction of the time or of the peak from which on something is a hotspot.
const HOTSPOT: f64 = 0.1;

fn milliseconds(seconds: f64) -> String {
    format!("{:.3} ms", 1e3 * seconds)
}

/// The tables, and the hotspots in words.
pub fn lines(profile: &Profile, display: DisplayOptions) -> Vec<String> {
    let paint = AnsiStyle { color: display.color };
    let update_s = profile.update_s;
    let mut lines = vec![
        format!(
            "{} {} of {}: {} each, {} without the profile{}",
            paint.bold("profile"),
            counted(profile.updates, "update"),
            counted(profile.plan.samples_per_update as u64, "sample"),
            milliseconds(update_s),
            milliseconds(profile.unprofiled_update_s),
            if profile.graphs { " and as a CUDA graph" } else { "" },
        ),
        format!(
            "overhead {} more ({}) for {}{}, taken out of each time below",
            milliseconds(profile.overhead_s),
            text::percent(profile.overhead_s, profile.unprofiled_update_s),
            counted(profile.timestamps, "timestamp"),
            if profile.graphs { " and for launching kernel by kernel" } else { "" },
        ),
        String::new(),
    ];
    let parts = profile.parts.iter().filter(|part| part.seconds > 0.0);
    let parts = parts.map(|part| {
        vec![part.name.to_owned(), milliseconds(part.seconds), text::percent(part.seconds, update_s)]
    });
    lines.extend(text::table("<>>", 2, &parts.collect::<Vec<_>>()));
    lines.push(String::new());
    let all = display.verbosity >= Verbosity::Verbose;
    lines.extend(node_table(profile, all));
    if !profile.kernels.is_empty() {
        lines.push(String::new());
        lines.extend(kernel_table(profile));
    }
    lines.push(String::new());
    lines.push(paint.bold("hotspots"));
    lines.extend(hotspots(profile).into_iter().map(|line| format!("  {line}")));
    if all {
        lines.push(String::new());
        lines.push(paint.bold("recomputing and offloading a block"));
        lines.extend(block_table(profile));
    }
    lines
}

/// The nodes by time, the slowest first; all of them, or the first few and the sum of the others.
fn node_table(profile: &Profile, all: bool) -> Vec<String> {
    let mut nodes: Vec<&NodeProfile> = profile.nodes.iter().collect();
    nodes.sort_by(|a, b| b.seconds().total_cmp(&a.seconds()));
    let listed = if all { nodes.len() } else { nodes.len().min(MAX_LISTED) };
    let (first, others) = nodes.split_at(listed);
    let head = ["layer", "forward", "backward", "of the update", "planned", "measured"];
    let mut rows = vec![head.map(String::from).to_vec()];
    let row = |name: String, forward: f64, backward: f64, planned: String, measured: String| {
        let share = text::percent(forward + backward, profile.update_s);
        vec![name, milliseconds(forward), milliseconds(backward), share, planned, measured]
    };
    for node in first {
        let backward = node.backward_s + node.recompute_s;
        let (planned, measured) = (text::bytes(node.planned_bytes), text::bytes(node.measured_bytes));
        rows.push(row(node.name.clone(), node.forward_s, backward, planned, measured));
        let mut kernels: BTreeMap<&str, (f64, f64)> = BTreeMap::new();
        let is_within = |kernel: &&KernelProfile| {
            all && kernel.node.is_some_and(|at| profile.nodes[at].name == node.name)
        };
        for kernel in profile.kernels.iter().filter(is_within) {
            let (forward, backward) = kernels.entry(kernel.kernel).or_default();
            *if kernel.part == "forward" { forward } else { backward } += kernel.seconds;
        }
        rows.extend(kernels.into_iter().map(|(kernel, (forward, backward))| {
            row(format!("  {}", words(kernel)), forward, backward, String::new(), String::new())
        }));
    }
    if !others.is_empty() {
        let sum = |of: fn(&NodeProfile) -> f64| others.iter().map(|node| of(node)).sum::<f64>();
        let name = format!("{} (`-v` lists all)", counted(others.len() as u64, "other layer"));
        let (forward, backward) =
            (sum(|node| node.forward_s), sum(|node| node.backward_s + node.recompute_s));
        rows.push(row(name, forward, backward, String::new(), String::new()));
    }
    text::table("<>>>>>", 2, &rows)
}

/// The name of a kernel, for people.
fn words(kernel: &str) -> String {
    kernel.replace('_', " ")
}

/// Seconds and calls of each kernel over the whole update, the slowest first.
fn kernel_sums(profile: &Profile) -> Vec<(&'static str, f64, f64)> {
    let mut sums: BTreeMap<&'static str, (f64, f64)> = BTreeMap::new();
    for kernel in &profile.kernels {
        let (seconds, calls) = sums.entry(kernel.kernel).or_default();
        *seconds += kernel.seconds;
        *calls += kernel.calls;
    }
    let mut sums: Vec<_> =
        sums.into_iter().map(|(kernel, (seconds, calls))| (kernel, seconds, calls)).collect();
    sums.sort_by(|a, b| b.1.total_cmp(&a.1));
    sums
}

fn kernel_table(profile: &Profile) -> Vec<String> {
    let mut rows = vec![["kernel", "time", "of the update", "calls"].map(String::from).to_vec()];
    rows.extend(kernel_sums(profile).into_iter().map(|(kernel, seconds, calls)| {
        let share = text::percent(seconds, profile.update_s);
        vec![words(kernel), milliseconds(seconds), share, format!("{calls:.0}")]
    }));
    text::table("<>>>", 2, &rows)
}

/// What each block would free and cost if it were recomputed, and if its input were offloaded besides.
fn block_table(profile: &Profile) -> Vec<String> {
    let has_offload = profile.blocks.iter().any(|block| block.offload.is_some());
    let head = ["block", "recompute frees", "costs", "offload frees", "copies", "costs", ""];
    let columns = if has_offload { 7 } else { 3 };
    let mut rows = vec![head[..columns].iter().map(|name| name.to_string()).collect::<Vec<_>>()];
    for block in &profile.blocks {
        let cost = text::percent(block.forward_s, profile.update_s);
        let mut row = vec![block.name.clone(), text::bytes(block.freed_by_recompute_bytes), cost];
        if has_offload {
            let BlockOffload { freed_bytes, copy_s, exposed_s } = block.offload.unwrap_or_default();
            let cost = text::percent(exposed_s, profile.update_s);
            row.extend([text::bytes(freed_bytes), milliseconds(copy_s), cost]);
        }
        row.extend(block.is_recomputed.then(|| "is recomputed".to_owned()));
        rows.push(row);
    }
    let mut lines = text::table("<>>>>><", 2, &rows);
    lines.push(match profile.copy_speed {
        Some(CopySpeed { to_host, to_device }) => format!(
            "  offloading moves the inputs of recomputed blocks to host memory: {:.1} GB/s there, {:.1} GB/s back",
            to_host / 1e9,
            to_device / 1e9
        ),
        None if has_offload => "  no block has an input to offload: a micro-batch stays on the device".to_owned(),
        None => "  offloading does not apply: on the CPU, activations are in host memory already".to_owned(),
    });
    lines
}

/// What takes a large fraction of the time or of the peak, and what could be done about it.
pub fn hotspots(profile: &Profile) -> Vec<String> {
    let share = |part: f64, whole: f64| text::percent(part, whole);
    let mut found = Vec::new();
    let mut nodes: Vec<&NodeProfile> = profile.nodes.iter().collect();
    nodes.sort_by(|a, b| b.seconds().total_cmp(&a.seconds()));
    for node in nodes.into_iter().take_while(|node| node.seconds() >= HOTSPOT * profile.update_s).take(3) {
        found.push(format!("{} of the time is `{}`", share(node.seconds(), profile.update_s), node.name));
    }
    for (kernel, seconds, _) in kernel_sums(profile) {
        if seconds < HOTSPOT * profile.update_s {
            break;
        }
        let is_matmul = ["matmul", "conv"].contains(&kernel);
        let advice = match is_matmul && profile.bf16_is_faster {
            true => ": `train.precision = \"bf16\"` multiplies in fewer steps on this processor",
            false => "",
        };
        let time = share(seconds, profile.update_s);
        found.push(format!("{time} of the time is the kernel `{}`{advice}", words(kernel)));
    }
    for part in &profile.parts {
        let advice = match part.name {
            "wait for data" => "raise `data.workers` or prepare the data in a faster format",
            "optimizer" => "raise `train.accumulation_steps` for fewer updates over the same samples",
            _ => continue,
        };
        if part.seconds >= HOTSPOT * profile.update_s {
            found.push(format!(
                "{} of the time is {}: {advice}",
                share(part.seconds, profile.update_s),
                part.name
            ));
        }
    }
    let is_slow = |enqueue_s: &f64| !profile.graphs && *enqueue_s > profile.update_s;
    if let Some(enqueue_s) = profile.enqueue_s.filter(is_slow) {
        found.push(format!(
            "the host takes {} to enqueue an update, and the GPU waits for it: CUDA graphs are off (`memory.graphs`)",
            milliseconds(enqueue_s)
        ));
    }
    let plan = &profile.plan;
    let peak = plan.peak.ram_bytes.max(plan.peak.vram_bytes) as f64;
    let mut parts: Vec<_> = plan.parts.iter().collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.bytes));
    for part in parts.into_iter().take_while(|part| part.bytes as f64 >= HOTSPOT * peak).take(3) {
        let (of_peak, bytes) = (share(part.bytes as f64, peak), text::bytes(part.bytes));
        let what = match part.role.to_string() == part.name {
            true => format!("the {}", part.name),
            false => format!("{} of `{}`", part.role, part.name),
        };
        let advice = smaller_with(part.role, plan.chosen.optimizer).map(|key| format!("; {key}"));
        found.push(format!("{of_peak} of the peak is {what}: {bytes}{}", advice.unwrap_or_default()));
    }
    let blocks: Vec<_> = profile.blocks.iter().filter(|block| block.freed_by_recompute_bytes > 0).collect();
    let freed: u64 = blocks.iter().map(|block| block.freed_by_recompute_bytes).sum();
    if freed as f64 >= HOTSPOT * peak {
        let cost: f64 = blocks.iter().map(|block| block.forward_s).sum();
        found.push(format!(
            "recomputing {} would free up to {} for {} more time: a smaller `memory.{}` makes the plan do it",
            counted(blocks.len() as u64, "block"),
            text::bytes(freed),
            share(cost, profile.update_s),
            if plan.peak.vram_bytes > 0 { "vram" } else { "ram" }
        ));
    }
    found
}

/// The key that makes the memory of a role smaller, if there is one.
fn smaller_with(role: Role, optimizer: OptimizerKind) -> Option<&'static str> {
    match role {
        Role::Activations | Role::Workspace | Role::Batch => {
            Some("a smaller `train.batch_size` with more `train.accumulation_steps` needs less")
        }
        Role::OptimizerState if optimizer == OptimizerKind::Adamw => {
            Some("`optimizer.kind = \"adamw8bit\"` keeps it in a quarter of that")
        }
        Role::DataPipeline => Some("`data.prefetch` and `data.workers` bound what is read ahead"),
        _ => None,
    }
}

/// The timeline in the trace-event format: complete events of one thread, in microseconds.
pub fn trace(profile: &Profile) -> Value {
    let named = |what: &str, name: &str| json!({ "name": what, "ph": "M", "pid": 1, "tid": 1, "args": { "name": name } });
    let mut events = vec![named("process_name", "trainer profile"), named("thread_name", "updates")];
    let microseconds = |nanoseconds: i64| nanoseconds as f64 / 1e3;
    events.extend(nested(&profile.timeline).into_iter().map(|(span, start, end)| {
        json!({
            "name": span.name, "cat": span.category, "ph": "X", "pid": 1, "tid": 1,
            "ts": microseconds(start), "dur": microseconds(end - start),
            "args": { "planned_bytes": span.reserved_bytes, "measured_bytes": span.heap_bytes },
        })
    }));
    json!({ "traceEvents": events, "displayTimeUnit": "ms" })
}

/// Spans with their start and end in whole nanoseconds, in order. Any two are nested or disjoint: trace viewers drop
/// spans that overlap in part, which rounding would cause.
fn nested(spans: &[TimelineSpan]) -> Vec<(&TimelineSpan, i64, i64)> {
    let nanoseconds = |seconds: f64| (1e9 * seconds).round() as i64;
    let times = |span: &TimelineSpan| (nanoseconds(span.start_s), nanoseconds(span.start_s + span.seconds));
    let rounded = spans.iter().zip(spans.iter().map(times));
    let mut spans: Vec<_> = rounded.map(|(span, (start, end))| (span, start, end)).collect();
    spans.sort_by_key(|(_, start, end)| (*start, std::cmp::Reverse(*end)));
    let (mut around, mut latest) = (Vec::<i64>::new(), i64::MIN);
    for (_, start, end) in &mut spans {
        // If a span was moved to the end of another, the spans within it move too.
        *start = latest.max(*start);
        // A span that starts in the last nanosecond of another and outlasts it overlaps only by rounding: start it
        // after that one.
        while let Some(outer) =
            around.pop_if(|outer| *outer <= *start || (*outer - 1 == *start && *outer < *end))
        {
            *start = outer.max(*start);
        }
        *end = around.last().map_or(*end, |outer| *outer.min(end)).max(*start);
        around.push(*end);
        latest = *start;
    }
    spans
}

/// Lines `frame;frame microseconds` for a flame graph of one update: the pass, the block, the node, the kernel.
pub fn folded_stacks(profile: &Profile) -> Vec<String> {
    let frame = |name: &str| name.replace(';', ",");
    let mut stacks = Vec::new();
    let mut push = |frames: &[&str], seconds: f64| {
        let microseconds = (1e6 * seconds).round();
        if microseconds >= 1.0 {
            let frames: Vec<String> = frames.iter().map(|name| frame(name)).collect();
            stacks.push(format!("update;{} {microseconds}", frames.join(";")));
        }
    };
    // The kernels first, then what is left of the time that they are part of.
    let mut push_kernels = |frames: &[&str], node: Option<usize>, part: &str, seconds: f64| {
        let kernels = profile.kernels.iter().filter(|kernel| (kernel.node, kernel.part) == (node, part));
        let left = kernels.fold(seconds, |left, kernel| {
            push(&[frames, &[&words(kernel.kernel)]].concat(), kernel.seconds);
            left - kernel.seconds
        });
        push(frames, left);
    };
    for (at, node) in profile.nodes.iter().enumerate() {
        let block = profile.blocks.get(node.block).map_or("", |block| block.name.as_str());
        let passes =
            [("forward", node.forward_s), ("recompute", node.recompute_s), ("backward", node.backward_s)];
        for (pass, seconds) in passes {
            push_kernels(&[pass, block, &node.name], Some(at), pass, seconds);
        }
    }
    for part in &profile.parts {
        if !["forward", "recompute", "backward"].contains(&part.name) {
            push_kernels(&[part.name], None, part.name, part.seconds);
        }
    }
    stacks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::fixtures;
    use crate::train::profile::{BlockProfile, PartTime, TimelineSpan};

    fn profile() -> Profile {
        let node = |name: &str, block, forward_s, backward_s| NodeProfile {
            name: name.into(),
            block,
            forward_s,
            backward_s,
            planned_bytes: 2048,
            measured_bytes: 2000,
            ..NodeProfile::default()
        };
        let block = |name: &str, freed| BlockProfile {
            name: name.into(),
            forward_s: 0.002,
            backward_s: 0.004,
            freed_by_recompute_bytes: freed,
            ..BlockProfile::default()
        };
        let part = |name, seconds| PartTime { name, seconds };
        let kernel = |kernel, part, node, seconds| KernelProfile { kernel, part, node, seconds, calls: 2.0 };
        Profile {
            updates: 4,
            update_s: 0.010,
            unprofiled_update_s: 0.0098,
            graphs: false,
            overhead_s: 0.0005,
            timestamps: 120,
            enqueue_s: None,
            parts: vec![
                part("wait for data", 0.002),
                part("forward", 0.002),
                part("recompute", 0.0),
                part("backward", 0.004),
                part("optimizer", 0.0005),
                part("other", 0.0015),
            ],
            nodes: vec![node("a;b", 0, 0.002, 0.003), node("loss", 1, 0.0, 0.001)],
            bf16_is_faster: true,
            kernels: vec![
                kernel("matmul", "forward", Some(0), 0.0015),
                kernel("matmul", "backward", Some(0), 0.003),
                kernel("batch_norm", "backward", Some(0), 0.0),
                kernel("update", "optimizer", None, 0.0004),
            ],
            blocks: vec![block("first", 1 << 40), block("loss", 0)],
            copy_speed: None,
            plan: fixtures::plan(),
            timeline: vec![TimelineSpan {
                name: "a;b".into(),
                category: "forward",
                start_s: 0.5,
                seconds: 0.002,
                reserved_bytes: 2048,
                heap_bytes: 2000,
            }],
        }
    }

    #[test]
    fn hotspots_say_what_to_do() {
        let found = hotspots(&profile());
        assert_eq!(found[0], "50.0 % of the time is `a;b`");
        assert_eq!(found[1], "10.0 % of the time is `loss`");
        assert!(
            found[2].starts_with("45.0 % of the time is the kernel `matmul`: `train.precision"),
            "{found:?}"
        );
        assert!(
            found[3].starts_with("20.0 % of the time is wait for data: raise `data.workers`"),
            "{found:?}"
        );
        assert!(
            found[4].contains("of `conv1`") && found[4].contains("a smaller `train.batch_size`"),
            "{found:?}"
        );
        assert!(!found.iter().any(|line| line.contains("enqueue")));
        let slow_host = hotspots(&Profile { enqueue_s: Some(0.02), ..profile() });
        assert!(
            slow_host.iter().any(|line| line.starts_with("the host takes 20.000 ms to enqueue")),
            "{slow_host:?}"
        );
        let last = found.last().unwrap();
        assert!(last.starts_with("recomputing 1 block would free up to 1.00 TiB for 20.0 %"), "{last}");
    }

    #[test]
    fn blocks_say_what_recomputing_and_offloading_them_frees_and_costs() {
        let squeeze = |line: &String| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let shown = |profile: &Profile| block_table(profile).iter().map(squeeze).collect::<Vec<_>>();
        let mut profile = profile();
        let on_cpu = shown(&profile);
        assert_eq!(on_cpu[..2], ["block recompute frees costs", "first 1.00 TiB 20.0 %"]);
        assert!(on_cpu[3].starts_with("offloading does not apply: on the CPU"), "{on_cpu:?}");
        profile.copy_speed = Some(CopySpeed { to_host: 25e9, to_device: 20e9 });
        profile.blocks[0].is_recomputed = true;
        profile.blocks[0].offload =
            Some(BlockOffload { freed_bytes: 3 << 20, copy_s: 0.004, exposed_s: 0.001 });
        let on_gpu = shown(&profile);
        assert_eq!(on_gpu[1], "first 1.00 TiB 20.0 % 3.00 MiB 4.000 ms 10.0 % is recomputed");
        assert!(on_gpu[3].ends_with("25.0 GB/s there, 20.0 GB/s back"), "{on_gpu:?}");
    }

    #[test]
    fn a_trace_has_complete_events_in_microseconds() {
        let trace = trace(&profile());
        let event = trace["traceEvents"].as_array().unwrap().iter().find(|event| event["ph"] == "X").unwrap();
        assert_eq!((&event["ph"], &event["ts"], &event["dur"]), (&json!("X"), &json!(5e5), &json!(2e3)));
    }

    /// In nanoseconds: 2 within 1 beyond its end by rounding, 3 beginning in the last nanosecond of 1, and 6 within 3.
    #[test]
    fn spans_of_a_trace_nest() {
        let span = |name: &str, start: f64, end: f64| TimelineSpan {
            name: name.into(),
            category: "node",
            start_s: start * 1e-9,
            seconds: (end - start) * 1e-9,
            reserved_bytes: 0,
            heap_bytes: 0,
        };
        let spans = [
            span("3", 9.4, 15.0),
            span("2", 4.0, 10.6),
            span("1", 0.0, 10.4),
            span("4", 15.2, 15.3),
            span("5", 20.0, 30.0),
            span("6", 9.4, 12.0),
        ];
        let nested: Vec<_> = super::nested(&spans)
            .into_iter()
            .map(|(span, start, end)| (span.name.as_str(), start, end))
            .collect();
        assert_eq!(
            nested,
            [("1", 0, 10), ("2", 4, 10), ("3", 10, 15), ("6", 10, 12), ("4", 15, 15), ("5", 20, 30)]
        );
    }

    /// The frames of a flame graph add up to the update.
    #[test]
    fn stacks_add_up_to_the_update() {
        let stacks = folded_stacks(&profile());
        assert_eq!(stacks[..2], ["update;forward;first;a,b;matmul 1500", "update;forward;first;a,b 500"]);
        assert!(stacks.contains(&"update;optimizer;update 400".to_owned()), "{stacks:?}");
        let total: f64 =
            stacks.iter().map(|stack| stack.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum();
        assert_eq!(total, 10_000.0);
    }

    #[test]
    fn kernels_are_summed_over_the_update_and_listed_below_their_layer() {
        let verbose = DisplayOptions { verbosity: Verbosity::Verbose, ..DisplayOptions::default() };
        let squeeze = |line: &String| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let shown: Vec<String> = lines(&profile(), verbose).iter().map(squeeze).collect();
        assert!(shown.contains(&"matmul 4.500 ms 45.0 % 4".to_owned()), "{shown:?}");
        assert!(shown.contains(&"update 0.400 ms 4.0 % 2".to_owned()), "{shown:?}");
        let layer = shown.iter().position(|line| line.starts_with("a;b ")).unwrap();
        assert!(
            shown[layer + 1].starts_with("batch norm ")
                && shown[layer + 2].starts_with("matmul 1.500 ms 3.000 ms")
        );
        let shown: Vec<String> = lines(&profile(), DisplayOptions::default()).iter().map(squeeze).collect();
        assert!(!shown.iter().any(|line| line.starts_with("matmul 1.500 ms")), "{shown:?}");
    }
}
