//! A whole scrub, and the scrub of a volume that nobody has mounted.

use crate::scrub::pace::Pace;
use crate::scrub::paths;
use crate::scrub::report::{Damage, Location, Part, ScrubReport};
use crate::scrub::source::{ScrubOptions, Source, Watch};
use crate::scrub::walk::{Walk, live_bytes};
use crate::volume::{Superblock, VolumeError, read_superblock, read_superblock_copies};
use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_journal::{Bystander, Journal, JournalError, JournalOptions};
use std::sync::Arc;

/// Memory for the home store's cache of a scrub that has the volume for itself, in bytes.
const HOME_CACHE_BYTES: usize = 64 << 20;

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
    let live_bytes = live_bytes(&journal)?;
    let source = Source {
        device: &**device,
        geometry: sb.geometry(),
        superblocks: read_superblock_copies(&**device),
        segments: &|| sb.segment_count,
        journal: &journal,
        settled: &|_| (),
        live_bytes,
    };
    let mut report = scrub_source(&source, options, env, watch);
    if let Some(cut) = recovered.log_damage {
        let (from, to) = (cut.lost_from.0, cut.lost_to.0);
        let what = format!("{}; contexts {from} to {to} are lost", cut.detail);
        let at = Location { device_offset: Some(cut.offset), ..Location::default() };
        report.add(Damage::new(Part::Log, what, at));
        report.clean = false;
    }
    Ok(report)
}

/// What keeps the volume from being opened is all that can be said of it.
fn closed_volume(sb: &Superblock, error: JournalError) -> Result<ScrubReport, VolumeError> {
    let Some((part, device_offset)) = Part::of_error(&sb.geometry(), &error) else {
        return Err(error.into());
    };
    let at = Location { device_offset, ..Location::default() };
    let mut report = ScrubReport::default();
    report.add(Damage::new(part, format!("{error}; nothing else can be reached"), at));
    Ok(report)
}
