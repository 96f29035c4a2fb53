//! How the volume flushes, changed while it is mounted.

use crate::api::{Cx, ioctl};
use crate::error::FsError;
use crate::local::local_fs::{LocalFs, errno};
use ferry_journal::FlushPolicy;
use std::time::Duration;

/// A [`ioctl::TUNE`] message: `u32 what, u32 policy, u64 fast_flush_ns` in the machine's byte
/// order.
struct Tune {
    what: u32,
    policy: u32,
    fast_flush_ns: u64,
}

impl Tune {
    fn decode(input: &[u8]) -> Option<Self> {
        let (what, rest) = input.split_first_chunk()?;
        let (policy, rest) = rest.split_first_chunk()?;
        let fast_flush_ns = u64::from_ne_bytes(*rest.first_chunk()?);
        Some(Self {
            what: u32::from_ne_bytes(*what),
            policy: u32::from_ne_bytes(*policy),
            fast_flush_ns,
        })
    }
}

impl LocalFs {
    /// The answer to [`ioctl::TUNE`].
    pub(crate) fn do_tune(&self, cx: &Cx, input: &[u8]) -> Result<Vec<u8>, FsError> {
        self.only_owner(cx)?;
        let asked = Tune::decode(input).ok_or_else(|| errno(libc::EINVAL))?;
        let known = ioctl::TUNE_FLUSH | ioctl::TUNE_FAST_FLUSH | ioctl::TUNE_RESET_FLUSH_TIME;
        let policy = FlushPolicy::ALL.get(asked.policy as usize).copied();
        let (false, Some(policy)) = (asked.what & !known != 0, policy) else {
            return Err(errno(libc::EINVAL));
        };
        let now = self.journal.stats().flush;
        let policy = if asked.what & ioctl::TUNE_FLUSH != 0 { policy } else { now.policy };
        let fast_flush = match asked.what & ioctl::TUNE_FAST_FLUSH {
            0 => now.fast_flush,
            _ => Duration::from_nanos(asked.fast_flush_ns),
        };
        if (policy, fast_flush) != (now.policy, now.fast_flush) {
            tracing::info!(volume = self.name, %policy, ?fast_flush, "flush policy changed");
            self.journal.set_flush_policy(policy, fast_flush);
        }
        if asked.what & ioctl::TUNE_RESET_FLUSH_TIME != 0 {
            self.journal.reset_flush_timing();
        }
        Ok(Vec::new())
    }
}
