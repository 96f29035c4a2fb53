//! No read is torn, in process: threads write, read, punch, cut and extend one file.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use ferry::{File, Options, Volume};
use ferry_bench::target::Target;
use ferry_bench::torn::{Plan, run};
use ferry_device::{Env, MemDevice};
use std::io;
use std::sync::Arc;
use std::time::Duration;

struct InProcess(File);

impl Target for InProcess {
    fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(out, offset)
    }
    fn write_at(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_at(data, offset)
    }
    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }
    fn punch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.0.punch(offset, len)
    }
}

fn volume(cache_bytes: usize) -> Volume {
    let device: Arc<dyn ferry_device::BlockDevice> = Arc::new(MemDevice::new(256 << 20));
    ferry_fs::mkfs(&device, &ferry_fs::MkfsOptions::default(), &Env::real()).unwrap();
    Volume::on(device, &Options { cache_bytes, ..Options::default() }).unwrap()
}

fn check(cache_bytes: usize) {
    let volume = volume(cache_bytes);
    let target = InProcess(volume.create("/file", 0o600).unwrap());
    let time = std::env::var("FERRY_TORN_SECONDS").map_or(4, |s| s.parse().unwrap());
    let plan = Plan { threads: 16, reads: u64::MAX, time: Duration::from_secs(time), seed: 7 };
    let env = Env::real();
    let seen = run(&target, plan, &|| env.clock.monotonic()).unwrap();
    println!("{seen:?}");
    assert_eq!((seen.torn, seen.stale, &seen.first), (0, 0, &None));
    assert!(seen.reads > 100 && seen.writes > 100 && seen.cuts > 10, "{seen:?}");
    drop(target);
    volume.close().unwrap();
}

#[test]
fn no_read_of_a_cached_file_is_torn() {
    check(256 << 20);
}

#[test]
fn no_read_of_a_file_larger_than_the_cache_is_torn() {
    check(8 << 20);
}
