//! No read is torn, in process: threads write, read, punch, cut and extend one file.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use ferry_bench::workload::torn::{MOST, Plan, Seen, run};
use ferry_bench::{Target, VolumeOptions};
use ferry_env::planted::{Bug, plant};
use ferry_fs::FsOptions;
use std::time::Duration;

/// One test, because a bug is planted in the whole process.
fn seen(cache_bytes: usize, time: Duration) -> Seen {
    let fs = FsOptions { cache_bytes, ..FsOptions::default() };
    let target =
        Target::in_process(&VolumeOptions { capacity: 512 << 20, fs, ..VolumeOptions::default() })
            .unwrap();
    let file = target.root().create("file").unwrap();
    run(&file, Plan { threads: 16, reads: u64::MAX, time, most: MOST, seed: 7 }).unwrap()
}

#[test]
fn no_read_is_torn_and_the_checker_sees_those_that_are() {
    // All of it in the cache, and a file larger than that.
    for cache_bytes in [256 << 20, 8 << 20] {
        let seen = seen(cache_bytes, Duration::from_secs(3));
        assert_eq!((seen.torn, seen.stale, &seen.first), (0, 0, &None));
        assert!(seen.reads > 100 && seen.writes > 100 && seen.cuts > 10, "{seen:?}");
    }
    let planted = plant(Bug::UncheckedRead);
    let found = (0..20).any(|_| seen(256 << 20, Duration::from_secs(3)).torn > 0);
    drop(planted);
    assert!(found, "reads that nobody checks are not found to be torn");
}
