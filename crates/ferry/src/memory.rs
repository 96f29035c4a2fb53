//! Memory that lies unused in the allocator goes back to the system.
//!
//! Cached data comes and goes in pieces of many sizes, among small things that stay; glibc keeps what becomes free between them. After
//! unpacking the kernel's sources that was 230 of 900 MiB.

#![expect(unsafe_code, reason = "malloc_trim(3) has no safe wrapper")]

use std::fs;

/// So much more than after the last time is worth a look.
const GROWTH: u64 = 64 << 20;

/// What the process had when it last gave back.
#[derive(Debug, Default)]
pub struct Tidy {
    settled: u64,
}

impl Tidy {
    /// Gives back if the process has grown.
    pub fn look(&mut self) {
        let Some(resident) = resident() else { return };
        if resident < self.settled + GROWTH {
            self.settled = self.settled.min(resident);
            return;
        }
        #[cfg(target_env = "gnu")]
        // SAFETY: any thread may call it at any time; it touches free memory only.
        unsafe {
            libc::malloc_trim(0);
        }
        self.settled = self::resident().unwrap_or(resident);
        tracing::debug!(before = resident, after = self.settled, "gave memory back");
    }
}

/// Bytes of this process in memory.
fn resident() -> Option<u64> {
    let pages = fs::read_to_string("/proc/self/statm").ok()?.split(' ').nth(1)?.parse::<u64>().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_freed_between_what_stays_is_given_back() {
        // Pieces below the size from which glibc maps each for itself.
        let pieces: Vec<Box<[u8]>> = (0..8192).map(|_| vec![1_u8; 32 << 10].into_boxed_slice()).collect();
        let kept: Vec<_> = pieces.into_iter().step_by(64).collect();
        let before = resident().expect("/proc is there");
        Tidy::default().look();
        let after = resident().expect("/proc is there");
        assert!(before - after > 100 << 20, "{before} {after}");
        assert_eq!(kept.iter().map(|piece| u64::from(piece[9])).sum::<u64>(), 128);
    }
}
