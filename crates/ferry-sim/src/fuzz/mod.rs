//! A volume's bytes as strangers can send them: populated volumes, damaged, and everything that
//! meets them.
//!
//! [`bases`] makes volumes, [`mutate`] damages one (with the checksums put right again, or not),
//! [`repaired`] repairs a copy of it, [`walk`] mounts it, reads all of it and works on it. Nothing
//! is asked of what they find; but nobody may panic, hang, or take memory without bound, who only
//! reads writes nothing, and a repair makes an end of the damage and loses nothing else. The
//! program `fuzz` runs seeds in processes of their own, so that an abort or an endless loop is a
//! failure like any other.

pub mod bases;
pub mod mutate;
pub mod repaired;
pub mod walk;

use crate::device::{SimDevice, SimRng, sim_env};
use bases::Bases;
use ferry_check::{FsckOptions, fsck};
use ferry_device::{BlockDevice, HookedDevice};
pub use repaired::Outcome;
use std::sync::Arc;

/// Damages the volume that follows from `seed` and lets everything meet it; tells `step` what comes
/// next.
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
    let outcome = repaired::run(&copy, &base.snapshot, &mut SimRng::new(seed), step)?;
    step("mount read-only");
    walk::read_only(&device, base.home, &mut rng);
    if image.trace_len() != 0 {
        return Err("a read-only mount wrote to the volume".into());
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
    Arc::new(HookedDevice::new(whole).with_capacity(capacity))
}

/// That it cannot be checked is a finding, too.
fn check(device: &Arc<dyn BlockDevice>, seed: u64) -> Result<(), String> {
    let (env, _) = sim_env(seed);
    match fsck(device, FsckOptions { verify_data: true, ..FsckOptions::default() }, &env) {
        Ok(report) if report.clean != report.findings.is_empty() => {
            Err("a check says that it found nothing, and lists it".into())
        }
        _ => Ok(()),
    }
}
