//! The machine that a report was made on.

use serde::Serialize;
use std::fs;

/// The machine that ran the benchmark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Processors that this process may use.
    pub cpus: usize,
    /// The processors' model name.
    pub cpu: String,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// The kernel's name and release.
    pub kernel: String,
    /// Load averages over 1, 5 and 15 minutes before the run: other work makes figures worse.
    pub load: String,
}

impl Machine {
    /// The machine of this process, now.
    pub fn this() -> Self {
        let uname = rustix::system::uname();
        let text = |words: &std::ffi::CStr| words.to_string_lossy().into_owned();
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model =
            cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let info = rustix::system::sysinfo();
        Self {
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            cpu: model.map_or_else(|| text(uname.machine()), |(_, name)| name.to_owned()),
            memory_bytes: info.totalram * u64::from(info.mem_unit),
            kernel: format!("{} {}", text(uname.sysname()), text(uname.release())),
            load: load.split_whitespace().take(3).collect::<Vec<_>>().join(" "),
        }
    }

    /// The machine in one line.
    pub fn line(&self) -> String {
        let memory = self.memory_bytes as f64 / f64::from(1 << 30);
        format!(
            "{} CPUs ({}), {memory:.1} GiB, {}, load {} at the start",
            self.cpus, self.cpu, self.kernel, self.load
        )
    }
}
