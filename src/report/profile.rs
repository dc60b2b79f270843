//! Renders the profile of a job: tables and hotspots for people, a trace for Chrome and Perfetto, stacks for a flame
//! graph.

use serde_json::{Value, json};

use super::text::{self, AnsiStyle};
use super::{DisplayOptions, Verbosity};
use crate::base::units::counted;
use crate::train::profile::{NodeProfile, Profile};

/// Nodes and blocks that the tables list without `--verbose`, the slowest first.
const MAX_LISTED: usize = 12;

/// Share of the time or of the peak from which something is a hotspot.
const HOTSPOT: f64 = 0.1;

fn milliseconds(seconds: f64) -> String {
    format!("{:.3} ms", 1e3 * seconds)
}

/// The tables, and the hotspots in words.
pub fn lines(profile: &Profile, display: DisplayOptions) -> Vec<String> {
    let paint = AnsiStyle { color: display.color };
    let update_s = profile.update_s;
    let overhead = (update_s / profile.unprofiled_update_s - 1.0).max(0.0);
    let mut lines = vec![
        format!(
            "{} {} of {}: {} each, {} without the profile ({:.1} % overhead)",
            paint.bold("profile"),
            counted(profile.updates, "update"),
            counted(profile.plan.samples_per_update as u64, "sample"),
            milliseconds(update_s),
            milliseconds(profile.unprofiled_update_s),
            100.0 * overhead
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
    lines.push(String::new());
    lines.push(paint.bold("hotspots"));
    lines.extend(hotspots(profile).into_iter().map(|line| format!("  {line}")));
    if all {
        lines.push(String::new());
        lines.push(paint.bold("recomputing a block"));
        lines.extend(recompute_table(profile));
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
    rows.extend(first.iter().map(|node| {
        let backward = node.backward_s + node.recompute_s;
        let (planned, measured) = (text::bytes(node.planned_bytes), text::bytes(node.measured_bytes));
        row(node.name.clone(), node.forward_s, backward, planned, measured)
    }));
    if !others.is_empty() {
        let sum = |of: fn(&NodeProfile) -> f64| others.iter().map(|node| of(node)).sum::<f64>();
        let name = format!("{} (`-v` lists all)", counted(others.len() as u64, "other layer"));
        let (forward, backward) =
            (sum(|node| node.forward_s), sum(|node| node.backward_s + node.recompute_s));
        rows.push(row(name, forward, backward, String::new(), String::new()));
    }
    text::table("<>>>>>", 2, &rows)
}

fn recompute_table(profile: &Profile) -> Vec<String> {
    let mut rows = vec![["block", "frees", "costs", ""].map(String::from).to_vec()];
    for block in &profile.blocks {
        let state = if block.is_recomputed { "is recomputed" } else { "" };
        let cost = text::percent(block.forward_s, profile.update_s);
        rows.push(vec![block.name.clone(), text::bytes(block.freed_by_recompute_bytes), cost, state.into()]);
    }
    text::table("<>><", 2, &rows)
}

/// What takes a large share of the time or of the peak, and what could be done.
pub fn hotspots(profile: &Profile) -> Vec<String> {
    let share = |part: f64, whole: f64| text::percent(part, whole);
    let mut found = Vec::new();
    let mut nodes: Vec<&NodeProfile> = profile.nodes.iter().collect();
    nodes.sort_by(|a, b| b.seconds().total_cmp(&a.seconds()));
    for node in nodes.into_iter().take_while(|node| node.seconds() >= HOTSPOT * profile.update_s).take(3) {
        found.push(format!("{} of the time is `{}`", share(node.seconds(), profile.update_s), node.name));
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
        found.push(format!("{of_peak} of the peak is {what}: {bytes}"));
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

/// The timeline in the trace-event format: complete events, in microseconds.
pub fn trace(profile: &Profile) -> Value {
    let events: Vec<Value> = profile
        .timeline
        .iter()
        .map(|span| {
            json!({
                "name": span.name, "cat": span.category, "ph": "X", "pid": 1, "tid": 1,
                "ts": 1e6 * span.start_s, "dur": 1e6 * span.seconds,
                "args": { "planned_bytes": span.reserved_bytes, "measured_bytes": span.heap_bytes },
            })
        })
        .collect();
    json!({ "traceEvents": events, "displayTimeUnit": "ms" })
}

/// Lines `frame;frame microseconds` for a flame graph of one update: the pass, the block, the node.
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
    for node in &profile.nodes {
        let block = profile.blocks.get(node.block).map_or("", |block| block.name.as_str());
        push(&["forward", block, &node.name], node.forward_s);
        push(&["recompute", block, &node.name], node.recompute_s);
        push(&["backward", block, &node.name], node.backward_s);
    }
    for part in &profile.parts {
        if !["forward", "recompute", "backward"].contains(&part.name) {
            push(&[part.name], part.seconds);
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
            is_recomputed: false,
        };
        let part = |name, seconds| PartTime { name, seconds };
        Profile {
            updates: 4,
            update_s: 0.010,
            unprofiled_update_s: 0.0098,
            parts: vec![
                part("wait for data", 0.002),
                part("forward", 0.002),
                part("recompute", 0.0),
                part("backward", 0.004),
                part("optimizer", 0.0005),
                part("other", 0.0015),
            ],
            nodes: vec![node("a;b", 0, 0.002, 0.003), node("loss", 1, 0.0, 0.001)],
            blocks: vec![block("first", 1 << 40), block("loss", 0)],
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
            found[2].starts_with("20.0 % of the time is wait for data: raise `data.workers`"),
            "{found:?}"
        );
        let last = found.last().unwrap();
        assert!(last.starts_with("recomputing 1 block would free up to 1.00 TiB for 20.0 %"), "{last}");
    }

    #[test]
    fn a_trace_has_complete_events_in_microseconds() {
        let trace = trace(&profile());
        let event = &trace["traceEvents"][0];
        assert_eq!((&event["ph"], &event["ts"], &event["dur"]), (&json!("X"), &json!(5e5), &json!(2e3)));
    }

    /// The frames of a flame graph add up to the update.
    #[test]
    fn stacks_add_up_to_the_update() {
        let stacks = folded_stacks(&profile());
        assert_eq!(stacks[0], "update;forward;first;a,b 2000");
        let total: f64 =
            stacks.iter().map(|stack| stack.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum();
        assert_eq!(total, 10_000.0);
    }
}
