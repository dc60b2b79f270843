//! `trainer probe`: what memory this machine has for a run, and what limits it.

use clap::Args;
use serde_json::json;

use super::{Common, Exit, say};
use crate::memory::probe::{Host, host};
use crate::units::Bytes;

/// Show what memory a run could have here, and what limits it
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer probe
  trainer probe --json")]
pub struct Probe {}

impl Probe {
    pub fn run(&self, common: &Common) -> anyhow::Result<Exit> {
        let host = host()?;
        if common.json {
            say(json!({ "host": host, "usable_bytes": host.usable(), "limited_by": host.limited_by() }))?;
        } else {
            say(table(&host).trim_end())?;
        }
        Ok(Exit::Done)
    }
}

fn table(host: &Host) -> String {
    let bytes = |b: Option<u64>| b.map_or("none".to_owned(), |b| Bytes(b).to_string());
    let mut out = String::new();
    for (name, value) in [
        ("memory", Bytes(host.total).to_string()),
        ("available", Bytes(host.available).to_string()),
        ("swap", format!("{} free of {}", Bytes(host.swap_free), Bytes(host.swap_total))),
        ("cgroup limit", bytes(host.cgroup.as_ref().map(|c| c.limit))),
        ("cgroup left", bytes(host.cgroup.as_ref().map(|c| c.left()))),
        ("address space limit", bytes(host.address_space.map(|a| a.limit))),
        ("cores", host.cores.to_string()),
    ] {
        out += &format!("{name:<20} {value:>12}\n");
    }
    out + &format!(
        "{:<20} {:>12}  limited by {}\n",
        "for a run",
        Bytes(host.usable()).to_string(),
        host.limited_by()
    )
}
