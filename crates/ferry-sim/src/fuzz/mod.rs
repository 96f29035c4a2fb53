//! A volume's bytes as strangers can send them: populated volumes, damaged, and everything that meets them.
//!
//! [`bases`] makes volumes, [`mutate`] damages one (with the checksums put right again, or not), [`repaired`] repairs a copy of it,
//! [`walk`] mounts it, reads all of it and works on it. Nothing is asked of what they find; but nobody may panic, hang, or take memory
//! without bound, who only reads writes nothing, and a repair makes an end of the damage and loses nothing else. The program `fuzz` runs
//! seeds in processes of their own, so that an abort or an endless loop is a failure like any other.

pub mod bases;
pub mod mutate;
pub mod repaired;
pub mod walk;

use crate::device::{SimDevice, SimRng, sim_env};
use bases::Bases;
use ferry_device::{AlignedBuf, BlockDevice, FlushTiming, Io};
use ferry_fs::{FsckOptions, fsck};
pub use repaired::Outcome;
use std::io;
use std::sync::Arc;

/// Damages the volume that follows from `seed` and lets everything meet it; tells `step` what comes next.
pub fn run(bases: &Bases, seed: u64, step: &mut dyn FnMut(&str)) -> Result<Outcome, String> {
    let mut rng = SimRng::new(seed ^ 0x6675_7a7a);
    step("damage");
    let base = bases.pick(&mut rng);
    let image = Arc::new(base.image.crash_image(0, &mut rng));
    let damage = mutate::damage(&image, base, &mut rng);
    image.restart_trace();
    let device = cut_off(image.clone(), damage.capacity);
    step("check");
    check(&device, seed)?;
    let copy = cut_off(Arc::new(image.copy()), damage.capacity);
    let outcome = repaired::run(&copy, &base.shown, &mut SimRng::new(seed), step)?;
    step("mount read-only");
    walk::read_only(&device, base.home, &mut rng);
    if image.trace_len() != 0 {
        return Err("who only reads wrote to the volume".into());
    }
    step("mount");
    walk::read_write(&device, base.home, &mut rng);
    step("check again");
    check(&device, seed)?;
    step("mount again");
    walk::read_write(&device, base.home, &mut rng);
    Ok(outcome)
}

fn cut_off(whole: Arc<SimDevice>, capacity: u64) -> Arc<dyn BlockDevice> {
    if capacity < whole.capacity() { Arc::new(Short { whole, capacity }) } else { whole }
}

/// That it cannot be checked is a finding, too.
fn check(device: &Arc<dyn BlockDevice>, seed: u64) -> Result<(), String> {
    let (env, _) = sim_env(seed);
    match fsck(device, FsckOptions { verify_data: true, progress: None }, &env) {
        Ok(report) if report.clean != report.findings.is_empty() => {
            Err("a check says that it found nothing, and lists it".into())
        }
        _ => Ok(()),
    }
}

/// A device that was cut off.
struct Short {
    whole: Arc<SimDevice>,
    capacity: u64,
}

impl Short {
    fn inside(&self, offset: u64, len: u64) -> io::Result<()> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.capacity);
        if inside { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EINVAL)) }
    }
}

impl BlockDevice for Short {
    fn capacity(&self) -> u64 {
        self.capacity
    }
    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        self.inside(offset, buf.len() as u64)?;
        self.whole.read(offset, buf)
    }
    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        self.inside(offset, buf.len() as u64)?;
        self.whole.write(offset, buf)
    }
    fn flush(&self) -> io::Result<()> {
        self.whole.flush()
    }
    fn submit(&self, batch: Vec<Io>) {
        for request in batch {
            match request {
                Io::Write { offset, buf, done } => match self.inside(offset, buf.len() as u64) {
                    Ok(()) => self.whole.submit(vec![Io::Write { offset, buf, done }]),
                    Err(error) => done(Err(error)),
                },
                flush => self.whole.submit(vec![flush]),
            }
        }
    }
    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inside(offset, len)?;
        self.whole.discard(offset, len)
    }
    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inside(offset, len)?;
        self.whole.allocate(offset, len)
    }
    fn host_free(&self) -> Option<u64> {
        self.whole.host_free()
    }
    fn flush_timing(&self) -> FlushTiming {
        self.whole.flush_timing()
    }
}
