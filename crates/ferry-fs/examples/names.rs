//! How fast names come and go in process, on a device in memory: `open run --release -p ferry-fs
//! --example names [FILES]`.
//!
//! Prints, for each step, the time of one operation. The steps are those of unpacking a tree and
//! removing it: create with a short write and release, look up, list with attributes, unlink with
//! the kernel's forgetting, and everything again after the volume was opened anew.

use ferry_device::{BlockDevice, MemDevice};
use ferry_env::Env;
use ferry_fs::{Filesystem, FsOptions, InProcess, Ino, LocalFs, MkfsOptions, ROOT, mkfs};
use std::sync::Arc;
use std::time::Duration;

/// Files in one directory.
const PER_DIR: usize = 1000;

struct Bench {
    fs: Arc<LocalFs>,
    env: Env,
    me: InProcess,
    files: usize,
}

impl Bench {
    fn step(&self, what: &str, count: usize, act: impl FnOnce()) {
        let start = self.env.clock.monotonic();
        act();
        let took = self.env.clock.monotonic() - start;
        let each = took.as_secs_f64() * 1e6 / count as f64;
        println!("{what:<34} {count:>8}   {:>8.3} s   {each:>7.2} µs each", took.as_secs_f64());
    }

    fn names(&self) -> impl Iterator<Item = (String, String)> + use<> {
        (0..self.files).map(|i| (format!("dir{}", i / PER_DIR), format!("file-{i}.c")))
    }

    fn lookup(&self, dir: Ino, name: &str) -> Ino {
        let entry = self.me.call(|cx| self.fs.lookup(cx, dir, name.as_bytes())).expect("lookup");
        entry.attr.expect("the name is there").ino
    }

    fn each(&self, mut act: impl FnMut(Ino, &str)) {
        let (mut at, mut dir) = (String::new(), ROOT);
        for (parent, name) in self.names() {
            if parent != at {
                dir = self.lookup(ROOT, &parent);
                at = parent;
            }
            act(dir, &name);
        }
    }

    fn create(&self, data: &[u8]) {
        for d in 0..self.files.div_ceil(PER_DIR) {
            let name = format!("dir{d}");
            self.me.call(|cx| self.fs.mkdir(cx, ROOT, name.as_bytes(), 0o755)).expect("mkdir");
        }
        self.each(|dir, name| {
            let made = self.me.call(|cx| {
                let absent = self.fs.lookup(cx, dir, name.as_bytes())?;
                assert!(absent.attr.is_none());
                let (entry, opened) =
                    self.fs.create(cx, dir, name.as_bytes(), 0o644, libc::O_RDWR)?;
                let ino = entry.attr.map_or(0, |attr| attr.ino);
                self.fs.write(cx, ino, opened.fh, 0, data, false, false)?;
                self.fs.release(cx, ino, opened.fh);
                Ok(())
            });
            made.unwrap_or_else(|e| panic!("create {name}: {e}: {:#}", self.fs.stats()));
        });
    }

    fn list(&self) {
        for d in 0..self.files.div_ceil(PER_DIR) {
            let dir = self.lookup(ROOT, &format!("dir{d}"));
            let listed = self.me.call(|cx| {
                self.fs.readdir(cx, dir, 0, 0, true, &mut |entry| {
                    if let Some(attr) = entry.entry.and_then(|e| e.attr) {
                        self.fs.forget(attr.ino, 1);
                    }
                    true
                })
            });
            listed.expect("readdir");
        }
    }

    fn unlink(&self) {
        self.each(|dir, name| {
            let ino = self.lookup(dir, name);
            self.me.call(|cx| self.fs.unlink(cx, dir, name.as_bytes())).expect("unlink");
            self.fs.forget(ino, u64::MAX);
        });
    }
}

fn resident_mib() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split(' ').nth(1).and_then(|p| p.parse::<u64>().ok()).unwrap_or(0);
    (pages * 4096) >> 20
}

fn main() {
    let files = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(80_000);
    let env = Env::real();
    let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(8 << 30));
    mkfs(&dev, &MkfsOptions::default(), &env).expect("mkfs");
    let options = FsOptions { commit_interval: Duration::from_secs(1), ..FsOptions::default() };
    let open = || LocalFs::open(dev.clone(), options.clone(), env.clone()).expect("open");
    let mut bench = Bench { fs: open(), env: env.clone(), me: InProcess::default(), files };

    let before = resident_mib();
    bench.step("create, write 100 bytes, release", files, || bench.create(&[7; 100]));
    println!("memory: {} MiB more than before", resident_mib() - before);
    bench.step("sync", 1, || bench.fs.sync().expect("sync"));
    bench.step("look up", files, || {
        bench.each(|dir, name| {
            bench.lookup(dir, name);
        })
    });
    bench.step("list with attributes", files, || bench.list());
    bench.step("close", 1, || bench.fs.close().expect("close"));
    bench.fs = open();
    bench.step("list with attributes, cold", files, || bench.list());
    bench.step("look up", files, || {
        bench.each(|dir, name| {
            bench.lookup(dir, name);
        })
    });
    bench.step("unlink, forget", files, || bench.unlink());
    bench.step("close", 1, || bench.fs.close().expect("close"));
}
