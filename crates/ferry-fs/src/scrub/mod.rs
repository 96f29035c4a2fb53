//! A scrub: reads everything that a volume holds from the device, past every cache, and holds it
//! against its checksums.
//!
//! It runs on a mounted volume while everything goes on ([`live`]), or on one that nobody has
//! mounted. Keys are scanned piece by piece; the blocks that the extents of a piece name are read
//! in the order of the device (`walk`). What does not match is damage only if the file still has it
//! there: a segment may be cleaned and filled anew while the scrub is on its way. Memory is bounded
//! by the piece, speed by [`ScrubOptions::rate`].

mod decode;
pub(crate) mod live;
mod pace;
mod paths;
mod report;
mod walk;

pub use crate::scrub::live::{ScrubState, ScrubStatus};
pub use crate::scrub::report::{DAMAGE_MAX, Damage, Part, ScrubReport, Verified};

use crate::scrub::pace::Pace;
use crate::scrub::walk::Walk;
use crate::volume::{Superblock, VolumeError, read_superblock, read_superblock_copies};
use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_journal::{Bystander, Geometry, Journal, JournalError, JournalOptions};
use std::sync::Arc;
use std::time::Duration;

/// Memory for the home store's cache of a scrub that has the volume for itself, in bytes.
const HOME_CACHE_BYTES: usize = 64 << 20;

/// How a scrub goes about it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubOptions {
    /// Most bytes that are read in a second; `None`: as many as the device gives.
    pub rate: Option<u64>,
}

/// How far a scrub has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubProgress {
    /// Bytes verified.
    pub done_bytes: u64,
    /// Bytes to verify, as far as is known: files come and go meanwhile.
    pub total_bytes: u64,
    /// Damaged blocks found so far.
    pub damaged_blocks: u64,
}

/// Whoever follows a scrub.
pub trait Watch {
    /// Told after each read. `false` ends the scrub.
    fn progress(&mut self, at: &ScrubProgress) -> bool;
    /// Waits so long: the scrub would be too fast. `false` ends it.
    fn wait(&mut self, time: Duration) -> bool;
}

/// Each copy's place on the device, and what is there.
pub(crate) type SuperblockCopies = Vec<(u64, Result<Superblock, String>)>;

/// What a scrub reads.
pub(crate) struct Source<'s> {
    pub(crate) device: &'s dyn BlockDevice,
    pub(crate) geometry: Geometry,
    /// As they were when the geometry was this one: a longer log moves both.
    pub(crate) superblocks: SuperblockCopies,
    pub(crate) journal: &'s Journal,
    /// Waits while somebody writes this device block.
    pub(crate) settled: &'s dyn Fn(u64),
    /// Bytes that extents refer to, if that is known.
    pub(crate) live_bytes: u64,
}

/// Scrubs all of it.
pub(crate) fn scrub_source(
    source: &Source<'_>,
    options: ScrubOptions,
    env: &Env,
    watch: &mut dyn Watch,
) -> ScrubReport {
    let mut walk = Walk::new(source, Pace::new(options.rate, env), watch);
    let complete = walk.superblocks() && walk.log() && walk.home() && walk.keys_and_data();
    // Names are wanted of a scrub that was stopped, too.
    let mut report = walk.finish(complete);
    paths::resolve(source.journal, &mut report.damage);
    report
}

/// Scrubs the volume on `device`, which nobody has mounted. Nothing is written. An error means that
/// it could not be opened.
pub fn scrub(
    device: &Arc<dyn BlockDevice>,
    options: ScrubOptions,
    env: &Env,
    watch: &mut dyn Watch,
) -> Result<ScrubReport, VolumeError> {
    let sb = read_superblock(device)?;
    let journal_options =
        JournalOptions { accept_damage: true, ..JournalOptions::offline(HOME_CACHE_BYTES) };
    let bystander = Arc::new(Bystander);
    let opened =
        Journal::open(device.clone(), sb.geometry(), journal_options, env.clone(), bystander);
    let (journal, recovered) = match opened {
        Ok(opened) => opened,
        Err(error) => return closed_volume(&sb, error),
    };
    let live_bytes = walk::live_bytes(&journal)?;
    let source = Source {
        device: &**device,
        geometry: sb.geometry(),
        superblocks: read_superblock_copies(&**device),
        journal: &journal,
        settled: &|_| (),
        live_bytes,
    };
    let mut report = scrub_source(&source, options, env, watch);
    if let Some(cut) = recovered.log_damage {
        let (from, to) = (cut.lost_from.0, cut.lost_to.0);
        let what = format!("{}; contexts {from} to {to} are lost", cut.detail);
        let damage = Damage::of_part(Part::Log, what);
        report.add(Damage { device_offset: Some(cut.offset), ..damage });
        report.clean = false;
    }
    Ok(report)
}

/// What keeps the volume from being opened is all that can be said of it.
fn closed_volume(sb: &Superblock, error: JournalError) -> Result<ScrubReport, VolumeError> {
    let Some((part, device_offset)) = Part::of_error(&sb.geometry(), &error) else {
        return Err(error.into());
    };
    let damage = Damage::of_part(part, format!("{error}; nothing else can be reached"));
    let mut report = ScrubReport::default();
    report.add(Damage { device_offset, ..damage });
    Ok(report)
}
