//! Free space goes back to the host when somebody asks for it.

use crate::api::{Answer, Cx};
use crate::local::local_fs::LocalFs;

/// The answer to [`crate::ioctl::FITRIM`]: a whole `struct fstrim_range`, whose length says what
/// was given back.
pub(crate) fn fitrim_answer(bytes: u64) -> Vec<u8> {
    [0, bytes, 0].into_iter().flat_map(u64::to_ne_bytes).collect()
}

impl LocalFs {
    /// What the host would have to give if the volume became full, and what it has; both in bytes.
    /// `None`: it need not be asked.
    pub fn host_needs(&self) -> Option<(u64, u64)> {
        self.data.host_needs()
    }

    /// The answer to [`crate::ioctl::TRIM`] and its like, from a thread that may wait.
    pub(crate) fn do_trim(&self, cx: &Cx, answer: fn(u64) -> Vec<u8>) -> Answer<Vec<u8>> {
        self.change_volume(cx, "trim", move |fs| Ok(answer(fs.data.trim()?)))
    }
}
