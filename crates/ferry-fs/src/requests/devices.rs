//! What a volume is kept on, where that is more than one device.

use crate::api::Cx;
use crate::error::FsError;
use crate::local::local_fs::{LocalFs, errno};
use ferry_device::ComponentState;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A longest name where there is little room, in characters; of a longer one the end is left.
const NAME_MAX: usize = 100;

/// One component, in the statistics.
#[derive(Serialize)]
pub(crate) struct Device {
    state: &'static str,
    read_errors: u64,
    write_errors: u64,
    repairs: u64,
    avg_flush_ns: u64,
    flush_samples: u32,
    /// Of a side that is being rebuilt; 0 of others.
    rebuilt_bytes: u64,
    /// How many `rebuilt_bytes` there will be; 0 of others.
    rebuild_bytes: u64,
    /// Blocks that no side could read when this one was built: it has zeros there.
    unreadable_blocks: u64,
}

impl LocalFs {
    /// The components and how they fare; none of a single device.
    pub(crate) fn devices(&self) -> BTreeMap<String, Device> {
        let components = self.dev.components().into_iter().map(|one| {
            let (rebuilt_bytes, rebuild_bytes) = one.rebuilt.unwrap_or_default();
            let device = Device {
                state: state_name(one.state),
                read_errors: one.read_errors,
                write_errors: one.write_errors,
                repairs: one.repairs,
                avg_flush_ns: u64::try_from(one.flush.avg.as_nanos()).unwrap_or(u64::MAX),
                flush_samples: one.flush.samples,
                rebuilt_bytes,
                rebuild_bytes,
                unreadable_blocks: one.unreadable,
            };
            (one.name, device)
        });
        components.collect()
    }

    /// The answer to [`crate::ioctl::REPLACE`].
    pub(crate) fn do_replace(&self, cx: &Cx<'_>, input: &[u8]) -> Result<Vec<u8>, FsError> {
        self.only_owner(cx)?;
        self.writable()?;
        let mut paths =
            input.split(|byte| *byte == 0).map(|path| Path::new(OsStr::from_bytes(path)));
        let (Some(old), Some(new)) = (paths.next(), paths.next()) else {
            return Err(errno(libc::EINVAL));
        };
        let begun = self.dev.replace(old, new);
        begun.map(|()| Vec::new()).map_err(|error| errno(error.raw_os_error().unwrap_or(libc::EIO)))
    }
}

/// Shortens the names of the components in the statistics.
pub(crate) fn shorten_names(devices: &mut serde_json::Value) {
    let Some(devices) = devices.as_object_mut() else { return };
    let end = |name: String| {
        let hidden = name.chars().count().saturating_sub(NAME_MAX);
        name.chars().skip(hidden).collect()
    };
    *devices = std::mem::take(devices).into_iter().map(|(name, one)| (end(name), one)).collect();
}

fn state_name(state: ComponentState) -> &'static str {
    match state {
        ComponentState::Active => "active",
        ComponentState::Failed => "failed",
        ComponentState::Rebuilding => "rebuilding",
        ComponentState::Replaced => "replaced",
        ComponentState::Absent => "absent or stale",
    }
}
