//! A new home store from what is readable of the old one.
//!
//! It is written into segments that nothing uses, and takes the old one's place by one write of a map slot: whenever
//! this is killed, either the old store and its log count, or the new one, which holds what the log brought too.

use crate::disk::{Disk, io_error};
use crate::home::{Batches, HomeFile, Opening, Point, Salvage};
use crate::layers::Changes;
use crate::record::LogArea;
use crate::recovery::{beyond, replay, tell};
use crate::salvage::{LostKeys, Range, walk};
use crate::{Geometry, JournalError, LogDamage, Seq, Value};
use ferry_device::{BlockDevice, Env};
use std::sync::Arc;

/// Greater than any key.
const KEYS_END: [u8; 32] = [0xff; 32];
/// Segments that are kept for the next checkpoint, if there are so many.
const SPARE: usize = 2;

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Rebuilt {
    /// Keys in the new home store.
    pub keys: u64,
    /// What could not be read of the old one.
    pub lost: Vec<LostKeys>,
    /// Where the log was cut off.
    pub log_damage: Option<LogDamage>,
    /// Segments of the old home store; nothing refers to them any more.
    pub old_segments: Vec<u32>,
    /// Segments of the new one.
    pub new_segments: Vec<u32>,
}

/// Writes all that is readable, of the home store and of the log, into a new home store in `free_segments`, which
/// nothing may use, and then makes it the volume's. The journal must not be open.
///
/// [`JournalError::HomeNeeds`] says how many segments are needed, if these do not suffice; nothing has changed then.
pub fn rebuild_home(
    device: Arc<dyn BlockDevice>,
    geometry: Geometry,
    env: &Env,
    free_segments: &[u32],
) -> Result<Rebuilt, JournalError> {
    let disk = Arc::new(Disk::new(device));
    let area = LogArea::new(&geometry);
    let old = Old::open(&disk, &geometry, &area, env)?;
    let mut out = Rebuilt { log_damage: old.log_damage.clone(), ..Rebuilt::default() };
    let kept = old.file.as_ref();
    out.old_segments = kept.map(|file| file.segments()).unwrap_or_default();
    if let Some(segment) = free_segments.iter().find(|segment| out.old_segments.contains(segment)) {
        return Err(JournalError::Home(format!("segment {segment} is the home store's").into()));
    }
    let new = HomeFile::unpublished(&disk, &geometry, free_segments, kept.map(|file| &**file));
    let needed = old.needed(new.unit_bytes());
    let written = copy(&new, old, &mut out);
    let room = |error| match new.explain(error) {
        JournalError::NoSpace => {
            JournalError::HomeNeeds { segments: needed.max(free_segments.len() as u32 + 1) }
        }
        other => other,
    };
    written.map_err(room)?;
    new.publish(SPARE)?;
    out.new_segments = new.segments();
    Ok(out)
}

/// Calls `visit` for each key that [`rebuild_home`] would find, ascending. Returns the segments of the home store. Writes nothing.
pub fn read_damaged(
    device: Arc<dyn BlockDevice>,
    geometry: Geometry,
    env: &Env,
    visit: &mut dyn FnMut(&[u8], &Value),
) -> Result<Vec<u32>, JournalError> {
    let disk = Arc::new(Disk::new(device));
    let old = Old::open(&disk, &geometry, &LogArea::new(&geometry), env)?;
    let mut visit = |key: &[u8], value: &Value| {
        visit(key, value);
        true
    };
    walk(&[&old.changes], old.salvage, Range { from: &[], to: &KEYS_END }, &mut visit, &mut |_| {})?;
    Ok(old.file.map(|file| file.segments()).unwrap_or_default())
}

fn copy(new: &Arc<HomeFile>, old: Old, out: &mut Rebuilt) -> Result<(), JournalError> {
    let mut batches = Batches::new(new)?;
    let mut failed = None;
    let mut put = |key: &[u8], value: &Value| {
        failed = batches.put(key, value).err();
        failed.is_none()
    };
    let range = Range { from: &[], to: &KEYS_END };
    walk(&[&old.changes], old.salvage, range, &mut put, &mut |gap| out.lost.push(gap))?;
    if let Some(error) = failed {
        return Err(error);
    }
    out.keys = batches.finish(old.end, true)?;
    Ok(())
}

/// What there is to be read.
struct Old {
    file: Option<Arc<HomeFile>>,
    salvage: Result<Salvage, JournalError>,
    /// What the log says happened after the checkpoint.
    changes: Changes,
    log_damage: Option<LogDamage>,
    /// Where the log goes on: behind everything that any block of it says.
    end: Point,
}

impl Old {
    fn open(disk: &Arc<Disk>, geo: &Geometry, area: &LogArea, env: &Env) -> Result<Self, JournalError> {
        let opened = HomeFile::open(disk, geo, Opening { read_only: true, in_order: true });
        let (file, salvage) = match opened {
            Ok(file) => {
                let salvage = Salvage::open(&file);
                (Some(file), salvage)
            }
            Err(error) => (None, Err(error)),
        };
        disk.flush_wait().map_err(io_error("log"))?;
        let (position, newest) = beyond(disk, area)?;
        let mut end = Point { seq: newest, position, id: env.entropy.next_u64() };
        let start = salvage.as_ref().map_err(Clone::clone).and_then(|s| s.state.clone());
        let (changes, log_damage) = match start {
            Ok(state) => {
                let replayed = replay(disk, area, state.point, true, &mut tell(env))?;
                end.seq = end.seq.max(replayed.end.seq);
                end.position = end.position.max(replayed.end.position);
                (replayed.changes, replayed.damage)
            }
            // Where the log begins is not known, so nothing of it can be told from what is older than the home store.
            Err(error) => {
                let lost = LogDamage {
                    offset: area.offset,
                    detail: format!("where it begins is not known: {error}"),
                    lost_from: Seq(1),
                    lost_to: newest,
                };
                (Changes::new(), Some(lost))
            }
        };
        Ok(Self { file, salvage, changes, log_damage, end })
    }

    /// Segments that surely suffice.
    fn needed(&self, unit: u64) -> u32 {
        let log: u64 =
            self.changes.iter().map(|(k, c)| (k.len() + c.as_ref().map_or(0, |v| v.len())) as u64).sum();
        let attached = self.file.as_ref().map_or(0, |file| file.attached());
        (attached as u64 + (2 * log).div_ceil(unit)) as u32 + SPARE as u32
    }
}
