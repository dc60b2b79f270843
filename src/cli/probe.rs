//! `trainer probe`: how much memory this machine has for a run, and what limits it.

use clap::Args;
use serde_json::json;

use super::{CommonArgs, Exit, print_line};
use crate::base::units::Bytes;
use crate::kernels::dispatch::{ENV_VAR, dispatch};
use crate::memory::device::{self, DeviceInfo};
use crate::memory::probe::{HostInfo, host};
use crate::report::text;

/// Show the devices, how much memory a run can use, and what limits it
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  trainer probe
  trainer probe --json")]
pub struct ProbeArgs {}

impl ProbeArgs {
    pub fn run(&self, common: &CommonArgs) -> anyhow::Result<Exit> {
        let host = host()?;
        let devices = device::all(&host);
        if common.json {
            print_line(json!({
                "devices": devices,
                "host": host,
                "usable_bytes": host.usable(),
                "limited_by": host.limited_by(),
                "cpu_dispatch": dispatch().name(),
            }))?;
        } else {
            lines(&devices, &host).iter().try_for_each(print_line)?;
        }
        Ok(Exit::Done)
    }
}

fn lines(devices: &[DeviceInfo], host: &HostInfo) -> Vec<String> {
    let limit = |b: Option<u64>| b.map_or("none".to_owned(), |b| Bytes(b).to_string());
    let known = |b: Option<u64>| b.map_or("unknown".to_owned(), |b| Bytes(b).to_string());
    let head = ["device", "memory", "free", "other processes", "capability", ""].map(str::to_owned);
    let row = |device: &DeviceInfo| {
        let capability =
            device.compute_capability.map_or("-".into(), |(major, minor)| format!("{major}.{minor}"));
        vec![
            device.name.clone(),
            Bytes(device.total_bytes).to_string(),
            Bytes(device.free_bytes).to_string(),
            known(device.others_bytes),
            capability,
            device.model.clone(),
        ]
    };
    let rows: Vec<Vec<String>> = std::iter::once(head.to_vec()).chain(devices.iter().map(row)).collect();
    let mut out = text::table("<>>>><", 0, &rows);
    out.push(String::new());
    let group = host.cgroup.as_ref();
    let rows = [
        ("host memory", Bytes(host.total).to_string(), String::new()),
        ("available", Bytes(host.available).to_string(), String::new()),
        (
            "cgroup limit",
            limit(group.map(|c| c.limit)),
            group.map_or_else(String::new, |c| c.path.display().to_string()),
        ),
        ("cgroup left", limit(group.map(|c| c.remaining())), String::new()),
        ("RLIMIT_AS", limit(host.address_space.map(|a| a.limit)), String::new()),
        ("RLIMIT_AS left", limit(host.address_space.map(|a| a.remaining())), String::new()),
        ("swap free", Bytes(host.swap_free).to_string(), format!("of {}; not used", Bytes(host.swap_total))),
        ("cores", host.cores.to_string(), String::new()),
        ("CPU dispatch", dispatch().name().to_owned(), format!("{ENV_VAR} selects another")),
        ("for a run", Bytes(host.usable()).to_string(), format!("limited by {}", host.limited_by())),
    ];
    let rows: Vec<Vec<String>> = rows.into_iter().map(|(a, b, c)| vec![a.to_owned(), b, c]).collect();
    out.extend(text::table("<><", 0, &rows));
    out
}
