//! The snapshots in `memory/` of a run: what each role held over the last two updates, and who held it at the peak.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader};

use super::stacked_area::StackedArea;
use super::{escape, icicle};
use crate::base::units::{counted, format_count};
use crate::base::{MemorySpace, Role};
use crate::memory::recorder::LedgerSnapshot;
use crate::report::text;
use crate::train::memory_snapshot::{self, MemorySnapshot, SnapshotReason};
use crate::train::run_dir::RunDir;

/// Moments of a chart at most.
const MAX_MOMENTS: usize = 200;

/// Every snapshot of a run; empty if it has none.
pub fn html(folder: &RunDir) -> io::Result<String> {
    let mut out = String::new();
    for path in memory_snapshot::files(folder) {
        let snapshot = File::open(&path)
            .and_then(|file| Ok(serde_json::from_reader::<_, MemorySnapshot>(BufReader::new(file))?));
        match snapshot {
            Ok(snapshot) => {
                out += &format!("<h3>{}</h3>\n", escape(&heading(&snapshot)));
                for space in &snapshot.spaces {
                    out += &space_html(space)?;
                }
            }
            Err(error) => {
                let text = format!("`{}` cannot be read: {error}.", path.display());
                out += &format!("<p class=warning>{}</p>\n", escape(&text));
            }
        }
    }
    Ok(out)
}

fn heading(snapshot: &MemorySnapshot) -> String {
    let step = format_count(snapshot.step);
    match (snapshot.reason, &snapshot.refused) {
        (SnapshotReason::Evaluation, _) => format!("After the evaluation at step {step}"),
        (SnapshotReason::End, _) => format!("At the end, step {step}"),
        (SnapshotReason::Oom, None) => format!("Out of memory after step {step}"),
        (SnapshotReason::Oom, Some(refused)) => format!(
            "Out of memory after step {step}, in {}: {} requested {} of {} for {}, {} left",
            refused.phase,
            refused.requester,
            text::bytes(refused.bytes),
            refused.space,
            refused.role,
            text::bytes(refused.left)
        ),
    }
}

fn space_html(space: &LedgerSnapshot) -> io::Result<String> {
    if space.holders.is_empty() {
        return Ok(String::new());
    }
    let at_peak = space.holders.iter().map(|holder| (holder.role, holder.name.as_str(), holder.peak_bytes));
    let boxes = icicle::html_of(&space.space.to_string(), at_peak).unwrap_or_default();
    let (peak, budget) = (text::bytes(space.peak_bytes), text::bytes(space.budget_bytes));
    if space.changes.is_empty() {
        return Ok(format!("<p>{peak} of {budget} were reserved:</p>\n{boxes}"));
    }
    let dropped = match space.dropped_changes {
        0 => String::new(),
        n => format!(" {} before are not kept.", counted(n, "change")),
    };
    let chart = chart(space).html()?;
    Ok(format!(
        "{chart}<p>At the peak, in {}, {peak} of {budget} were reserved.{dropped}</p>\n{boxes}",
        space.peak_phase
    ))
}

/// The bytes of each role over time. Of the changes in a short time, the moment with the most bytes is drawn, so that
/// the peak is exact.
fn chart(space: &LedgerSnapshot) -> StackedArea {
    let mut held: BTreeMap<Role, u64> = BTreeMap::new();
    for holder in &space.holders {
        *held.entry(holder.role).or_default() += holder.first_bytes;
    }
    let roles: Vec<Role> = held.keys().copied().collect();
    let mut moments: Vec<(f64, Vec<u64>)> = vec![(0.0, held.values().copied().collect())];
    let per_moment = space.changes.len().div_ceil(MAX_MOMENTS - 2).max(1);
    for changes in space.changes.chunks(per_moment) {
        let mut highest: Option<(f64, Vec<u64>)> = None;
        for change in changes {
            let role = space.holders.get(change.holder as usize).map_or(Role::Reserve, |holder| holder.role);
            let bytes = held.entry(role).or_default();
            *bytes = bytes.saturating_add_signed(change.bytes);
            let total = held.values().sum::<u64>();
            if highest.as_ref().is_none_or(|(_, values)| total > values.iter().sum()) {
                highest = Some((change.seconds, roles.iter().map(|role| held[role]).collect()));
            }
        }
        moments.extend(highest);
    }
    let end = space.changes.last().map_or(0.0, |change| change.seconds);
    moments.push((end, roles.iter().map(|role| held[role]).collect()));
    let band = |(at, role): (usize, &Role)| {
        (role.to_string(), moments.iter().map(|(_, values)| values[at]).collect::<Vec<u64>>())
    };
    let bands = roles.iter().enumerate().map(band);
    let mut bands: Vec<_> = bands.filter(|(_, values)| values.iter().any(|bytes| *bytes > 0)).collect();
    // What is always held is at the bottom, so that only what varies moves.
    bands.sort_by_key(|(_, values)| std::cmp::Reverse(values.iter().copied().min()));
    StackedArea {
        title: format!("Reserved {} by role: the last two updates and what followed", name(space.space)),
        bands,
        times: moments.iter().map(|(time, _)| *time).collect(),
    }
}

fn name(space: MemorySpace) -> &'static str {
    match space {
        MemorySpace::Ram => "host memory",
        MemorySpace::Vram => "device memory",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Ledger;
    use crate::train::engine::Ledgers;

    #[test]
    fn a_snapshot_has_its_reason_its_peak_and_its_holders() {
        let (home, ledger) = (tempfile::tempdir().unwrap(), Ledger::new(10 << 20, None));
        ledger.record();
        let (folder, ledgers) =
            (RunDir::new(home.path()), Ledgers { tensors: ledger.clone(), host: ledger.clone() });
        let _weights = ledger.reserve(Role::Weights, "w", 4 << 20).unwrap();
        // More changes than moments: the peak is exact all the same.
        for i in 0..3000u64 {
            let kib = if i == 1234 { 5 << 10 } else { 1 + i % 1000 };
            drop(ledger.reserve(Role::Activations, "block.<fc1>", kib << 10).unwrap());
        }
        let oom = ledger.reserve(Role::Workspace, "fc2", 7 << 20).unwrap_err();
        let snapshot = MemorySnapshot::new(3, SnapshotReason::Oom, &ledgers, Some(&oom));
        snapshot.write(&folder).unwrap();
        std::fs::write(folder.memory().join("end.json"), "{\"step\":").unwrap();
        let page = html(&folder).unwrap();
        for part in [
            "Out of memory after step 3, in start: fc2 requested 7.00 MiB of ram for workspace, 6.00 MiB left",
            "activations, at most 5.00 MiB",
            "At the peak, in start, 9.00 MiB of 10.0 MiB were reserved.",
            "block.&lt;fc1&gt;: 5.00 MiB",
            "end.json` cannot be read",
        ] {
            assert!(page.contains(part), "{part}\n{page}");
        }
        let chart = chart(&snapshot.spaces[0]);
        assert!(chart.times.len() <= MAX_MOMENTS && page.len() < 40_000, "{} bytes", page.len());
    }
}
