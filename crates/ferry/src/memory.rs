//! The allocator of `ferry`, chosen for the daemon, and of `ferry-bench`.
//!
//! A checkpoint frees millions of small allocations at once, while the threads that answer programs
//! make others. glibc merges freed memory with its neighbours all at once, under the lock of its
//! arena: one such merge kept every request of a mount waiting for 1.1 s, and so did returning
//! memory to the system. jemalloc's locks cover allocations of one size in one arena, for as long
//! as a few of them take. A background thread returns memory that was not used for a second.

#![expect(unsafe_code, reason = "the name under which the allocator looks for its options")]

use tikv_jemallocator::Jemalloc;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

/// Freed memory returns to the system after a second. The default is four arenas for each core,
/// whose unused memory adds up; here there are four arenas in all.
// SAFETY: the allocator reads it as a pointer to a C string, when the process starts; it has no
// other user.
#[unsafe(export_name = "_rjem_malloc_conf")]
static OPTIONS: Option<&'static u8> =
    Some(&b"background_thread:true,narenas:4,dirty_decay_ms:1000,muzzy_decay_ms:0\0"[0]);

#[cfg(test)]
mod tests {
    use ferry_env::Env;
    use std::time::Duration;
    use std::{fs, thread};

    /// Resident bytes of this process.
    fn resident() -> u64 {
        let words = fs::read_to_string("/proc/self/statm").expect("/proc is there");
        let pages = words.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
        pages.expect("a number of pages") * rustix::param::page_size() as u64
    }

    #[test]
    fn memory_between_live_blocks_returns_to_the_system() {
        let blocks: Vec<Box<[u8]>> =
            (0..8192).map(|_| vec![1_u8; 32 << 10].into_boxed_slice()).collect();
        let before = resident();
        let retained: Vec<_> = blocks.into_iter().step_by(64).collect();
        let clock = Env::real().clock;
        let begun = clock.monotonic();
        while before.saturating_sub(resident()) < 100 << 20 {
            assert!(
                clock.monotonic() - begun < Duration::from_secs(60),
                "{before} then, {} now",
                resident()
            );
            #[expect(
                clippy::disallowed_methods,
                reason = "another thread gives back, in its own time"
            )]
            thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(retained.iter().map(|block| u64::from(block[9])).sum::<u64>(), 128);
    }
}
