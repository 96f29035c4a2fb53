//! Rates of the store alone, on a device in memory: `cargo run --release -p ferry-fs --example
//! contents [FILES] [BYTES]`.

use ferry_device::{BlockDevice, MemDevice};
use ferry_env::Env;
use ferry_fs::error::FsError;
use ferry_fs::inode::incore::Inode;
use ferry_fs::inode::table::InodeSource;
use ferry_fs::keys::{self, InodeRecord};
use ferry_fs::store::data_store::{At, Busy, DataOptions, DataStore, Dirty, Touch};
use ferry_journal::{
    Credits, FAST_FLUSH, FlushPolicy, Geometry, Journal, JournalOptions, LogOptions, Seq,
};
use std::sync::{Arc, Mutex};
use std::time::Duration;

type Any = Box<dyn std::error::Error>;

/// Inodes of the run, by number.
struct Inodes(Mutex<Vec<Arc<Inode>>>);

impl InodeSource for Inodes {
    fn trim(&self, _most: usize) -> usize {
        0
    }
    fn inode(&self, ino: u64) -> Result<Option<Arc<Inode>>, FsError> {
        let known = self.0.lock().map_err(|_| FsError::Errno(ferry_fs::Errno(libc::EIO)))?;
        Ok(known.iter().find(|i| i.ino == ino).cloned())
    }
    fn name_hint(&self, ino: u64) -> String {
        format!("inode {ino}")
    }
}

struct Run {
    env: Env,
    journal: Arc<Journal>,
    store: Arc<DataStore>,
    inodes: Arc<Inodes>,
}

const MIB: u64 = 1 << 20;

fn open() -> Result<Run, Any> {
    let (log_len, map_len, segments) = (64 * MIB, 8192, 1000_u32);
    let geometry = Geometry {
        volume_id: [1; 16],
        hash_key: [7; 16],
        log_offset: 4096,
        log_len,
        home_map_offsets: [4096 + log_len, 4096 + log_len + map_len],
        home_map_len: map_len,
        segments_offset: 4096 + log_len + 2 * map_len,
        segment_len: 8 * MIB,
        segment_count: segments,
    };
    let env = Env::real();
    let size = geometry.segments_offset + u64::from(segments) * geometry.segment_len;
    let dev: Arc<dyn BlockDevice> = Arc::new(MemDevice::new(size));
    Journal::format(&dev, &geometry, &[0, 1], &env)?;
    let options = DataOptions {
        cache_bytes: 256 << 20,
        writeback_age: Duration::from_secs(5),
        background: true,
        read_only: false,
        known: None,
        #[cfg(feature = "compare")]
        locking: ferry_fs::Locking::Range,
    };
    let store = DataStore::new(dev.clone(), geometry, options, env.clone());
    let options = JournalOptions {
        flush: FlushPolicy::default(),
        fast_flush: FAST_FLUSH,
        flush_interval_min: Duration::ZERO,
        log: LogOptions::default(),
        commit_interval: Duration::from_secs(1),
        home_cache_bytes: 32 << 20,
        reads_all: false,
        read_only: false,
        background: true,
        accept_damage: false,
        tail: None,
        left: None,
    };
    let (journal, recovered) = Journal::open(dev, geometry, options, env.clone(), store.clone())?;
    let journal = Arc::new(journal);
    let inodes = Arc::new(Inodes(Mutex::new(Vec::new())));
    store.start(journal.clone(), &recovered, inodes.clone())?;
    Ok(Run { env, journal, store, inodes })
}

impl Run {
    fn create(&self, ino: u64) -> Result<Arc<Inode>, Any> {
        let rec = InodeRecord { mode: libc::S_IFREG | 0o644, nlink: 1, ..InodeRecord::default() };
        let mut txn = self.journal.begin(Credits { keys: 1, bytes: 200, urgent: false })?;
        txn.put(&keys::inode(ino), &rec.encode());
        txn.commit();
        let inode = Arc::new(Inode::new(ino, rec));
        self.inodes.0.lock().map_err(|_| "poisoned")?.push(inode.clone());
        Ok(inode)
    }

    fn force(&self, seq: Seq) -> Result<(), Any> {
        let (tell, told) = std::sync::mpsc::channel();
        self.journal.force(seq, Box::new(move |result| tell.send(result).unwrap_or(())));
        Ok(told.recv()??)
    }

    /// Times `work`, which handles `count` things and `bytes` bytes.
    fn time(
        &self,
        what: &str,
        count: u64,
        bytes: u64,
        work: impl FnOnce() -> Result<(), Any>,
    ) -> Result<(), Any> {
        let (start, cpu) = (self.env.clock.monotonic(), cpu_seconds()?);
        work()?;
        let took = (self.env.clock.monotonic() - start).as_secs_f64();
        let cpu = cpu_seconds()? - cpu;
        println!(
            "{what:40} {took:7.3} s {:9.0}/s {:6.2} GB/s; {cpu:6.2} s of CPU, {:5.1} us each",
            count as f64 / took,
            bytes as f64 / took / 1e9,
            cpu * 1e6 / count as f64,
        );
        Ok(())
    }
}

/// CPU time of this process: on a busy machine it tells more than the clock.
fn cpu_seconds() -> Result<f64, Any> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let mut fields = stat.rsplit(')').next().ok_or("no fields")?.split_whitespace().skip(11);
    let mut ticks = || -> Result<f64, Any> { Ok(fields.next().ok_or("short")?.parse()?) };
    Ok((ticks()? + ticks()?) / 100.0)
}

fn main() -> Result<(), Any> {
    let mut args = std::env::args().skip(1);
    let files: u64 = args.next().map_or(Ok(78_579), |a| a.parse())?;
    let bytes: usize = args.next().map_or(Ok(17_300), |a| a.parse())?;
    let run = open()?;
    let data: Vec<u8> =
        (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let total = files * bytes as u64;
    run.time("create, write, write back all", files, total, || {
        for ino in 10..10 + files {
            let inode = run.create(ino)?;
            run.store.write(&inode, At::Offset(0), &data[..bytes], Touch::Nothing)?;
        }
        let seq = run.store.write_back(Dirty::All, Busy::Wait)?;
        run.force(seq)
    })?;
    println!("{:?}", run.store.stats());
    run.time("read them", files, total, || {
        let inodes = run.inodes.0.lock().map_err(|_| "poisoned")?.clone();
        let mut out = vec![0; bytes];
        for inode in inodes {
            run.store.read(&inode, 0, &mut out)?;
        }
        Ok(())
    })?;
    run.time("reclaim them", files, 0, || {
        for inode in std::mem::take(&mut *run.inodes.0.lock().map_err(|_| "poisoned")?) {
            let room = Credits { keys: 1, bytes: 16, urgent: true };
            run.store.reclaim(&inode, room, &mut |txn| txn.delete(&keys::inode(inode.ino)))?;
        }
        Ok(())
    })?;
    let syncs = files / 4;
    run.time("create, write 4 KiB, fsync, one by one", syncs, syncs * 4096, || {
        for ino in 0..syncs {
            let inode = run.create(1_000_000 + ino)?;
            run.store.write(&inode, At::Offset(0), &data[..4096], Touch::Nothing)?;
            run.force(run.store.write_back(Dirty::File(&inode), Busy::Wait)?)?;
        }
        Ok(())
    })?;
    large(&run, &data)
}

/// One large file, written and read from front to back.
fn large(run: &Run, data: &[u8]) -> Result<(), Any> {
    let inode = run.create(9)?;
    let mib = 2048;
    run.time("write 2 GiB by 1 MiB, force", mib, mib * MIB, || {
        for i in 0..mib {
            run.store.write(&inode, At::Offset(i * MIB), data, Touch::Nothing)?;
        }
        run.force(run.store.write_back(Dirty::File(&inode), Busy::Wait)?)
    })?;
    let mut out = vec![0; 1 << 20];
    run.time("read 2 GiB by 1 MiB", mib, mib * MIB, || {
        for i in 0..mib {
            run.store.read(&inode, i * MIB, &mut out)?;
        }
        Ok(())
    })?;
    run.time("read 256 MiB by 16 KiB", mib * 8, mib / 8 * MIB, || {
        for i in 0..mib * 8 {
            run.store.read(&inode, i << 14, &mut out[..1 << 14])?;
        }
        Ok(())
    })?;
    println!("{:?}", run.store.stats());
    run.store.close()?;
    run.journal.close()?;
    Ok(())
}
