//! A new home store from what is readable of the old one.
//!
//! It is written into segments that nothing uses, and takes the old one's place by one write of a
//! map slot: whenever this is killed, either the old store and its log count, or the new one, which
//! holds what the log brought too.

use crate::disk::{Disk, io_error};
use crate::home::map::HomeMap;
use crate::home::{
    Batches, HomeFile, HomeState, Opening, PageSource, Salvage, Search, Tree, Weight,
};
use crate::log::recovery::{Beyond, Replay, beyond, newest_chain, replay, tell};
use crate::log::ring::LogArea;
use crate::types::{Changes, Point};
use crate::view::salvage::{LostKeys, Range, walk};
use crate::{Geometry, JournalError, LogDamage, Seq, Value};
use ferry_device::BlockDevice;
use ferry_env::Env;
use std::sync::Arc;

/// Greater than any key.
const KEYS_END: [u8; 32] = [0xff; 32];
/// Segments that are kept for the next checkpoint, if there are so many.
const SPARE: usize = 2;

/// A state of the home store that was found by looking at all of its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundState {
    /// With what the log says happened since, it is as new as anything on the volume.
    pub complete: bool,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Rebuilt {
    /// Keys in the new home store.
    pub keys: u64,
    /// What could not be read of the old one.
    pub lost: Vec<LostKeys>,
    /// Another state of the store was taken than the one that it names, or nothing named one.
    pub found: Option<FoundState>,
    /// Where the log was cut off.
    pub log_damage: Option<LogDamage>,
    /// Segments of the old home store; nothing refers to them any more.
    pub old_segments: Vec<u32>,
    /// Segments of the new one.
    pub new_segments: Vec<u32>,
}

/// Writes all that is readable, of the home store and of the log, into a new home store in
/// `free_segments`, which nothing may use, and then makes it the volume's. The journal must not be
/// open.
///
/// Without `give_up_unreadable`, [`JournalError::Unreadable`] says that something would be lost
/// because the device cannot read it; nothing has changed then.
///
/// [`JournalError::HomeNeeds`] says how many segments are needed, if these do not suffice; nothing
/// has changed then.
pub fn rebuild_home(
    device: Arc<dyn BlockDevice>,
    geometry: Geometry,
    env: &Env,
    free_segments: &[u32],
    give_up_unreadable: bool,
) -> Result<Rebuilt, JournalError> {
    let log = geometry.log_offset..geometry.log_offset + geometry.log_len;
    let disk = Arc::new(Disk::watched(device, log));
    let area = LogArea::new(&geometry);
    let old = Old::open(&disk, &geometry, &area, env)?;
    if let Some(LogDamage { offset, unreadable: Some(source), .. }) = &old.log_damage
        && !give_up_unreadable
    {
        return Err(JournalError::Unreadable {
            what: "log",
            offset: *offset,
            source: source.clone(),
        });
    }
    let mut out = Rebuilt {
        found: old.source.found,
        log_damage: old.log_damage.clone(),
        ..Rebuilt::default()
    };
    let kept = old.file.as_ref();
    out.old_segments = kept.map(|file| file.segments()).unwrap_or_default();
    if let Some(segment) = free_segments.iter().find(|segment| out.old_segments.contains(segment)) {
        return Err(JournalError::Home(format!("segment {segment} is the home store's").into()));
    }
    let new = HomeFile::unpublished(&disk, &geometry, free_segments, kept.map(|file| &**file));
    let (needed, begins) = (old.needed(new.unit_bytes()), old.source.start.is_some());
    let written = copy(&new, old, &mut out);
    let room = |error| match new.explain(error) {
        JournalError::NoSpace => {
            JournalError::HomeNeeds { segments: needed.max(free_segments.len() as u32 + 1) }
        }
        other => other,
    };
    written.map_err(room)?;
    // Whether it is what could not be read that is missing, or what is damaged beside it, nobody
    // can tell.
    let missing = !begins || !out.lost.is_empty() || out.found.is_some_and(|found| !found.complete);
    if let Some((offset, source)) = disk.unreadable().filter(|_| missing && !give_up_unreadable) {
        return Err(JournalError::Unreadable { what: "home store", offset, source });
    }
    HomeMap::mark(&disk, &geometry, false)?;
    new.publish(SPARE)?;
    new.come_to_rest()?;
    out.new_segments = new.segments();
    Ok(out)
}

/// Calls `visit` for each key that [`rebuild_home`] would find, ascending. Returns the segments of
/// the home store. Writes nothing.
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
    walk(
        &[&old.changes],
        old.source.salvage,
        Range { from: &[], to: &KEYS_END },
        &mut visit,
        &mut |_| {},
    )?;
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
    let mut lost = Vec::new();
    walk(&[&old.changes], old.source.salvage, range, &mut put, &mut |gap| lost.push(gap))?;
    if !old.source.history {
        out.lost = lost;
    }
    if let Some(error) = failed {
        return Err(error);
    }
    out.keys = batches.finish(old.end, true)?;
    Ok(())
}

/// The log as a rebuild reads it.
struct Log<'a> {
    disk: &'a Disk,
    area: &'a LogArea,
    /// The newest context that any of its records names.
    newest: Seq,
    /// Nothing was written to it since the home store came to rest.
    at_rest: bool,
    env: &'a Env,
}

impl Log<'_> {
    fn replay(&self, start: Point) -> Result<Replay, JournalError> {
        replay(self.disk, self.area, start, self.at_rest, true, &mut tell(self.env))
    }
}

/// Where the keys come from.
struct Source {
    salvage: Result<Salvage, JournalError>,
    /// The log is read from here; `None`: where is not known.
    start: Option<Point>,
    found: Option<FoundState>,
    /// The log alone says everything.
    history: bool,
    /// The newest context that a page says is in the store, where they were looked at.
    newest: Seq,
}

impl Source {
    /// The state that the store names.
    fn named(salvage: Result<Salvage, JournalError>) -> Self {
        let start =
            salvage.as_ref().ok().and_then(|s| s.state.as_ref().ok()).map(|state| state.point);
        Self { salvage, start, found: None, history: false, newest: Seq(0) }
    }

    /// Looks for more than what a damaged store names: the log from its beginning on; or else a
    /// state that is whole, and from which the log leads to its end. Else what is newest counts,
    /// gaps or not, unless an older state that is whole has more keys: the state that the store
    /// names, if its tree begins anywhere, or one that is found; else the best tree that is left.
    ///
    /// Changes that the home store has already may be replayed: the last of each key counts. So the
    /// log is read from as far back as it leads.
    fn search(
        file: &Arc<HomeFile>,
        named: Result<Salvage, JournalError>,
        log: &Log<'_>,
    ) -> Result<Self, JournalError> {
        let copy = file.salvage();
        let mut search = Search::new(&copy);
        let newest = Seq(search.newest);
        let lost = JournalError::Damaged {
            what: "home store",
            offset: copy.device_offset(0),
            detail: "its newest state is lost".into(),
        };
        let chain = newest_chain(log.disk, log.area);
        let chain = chain
            .map(|start| Ok::<_, JournalError>((start, log.replay(start)?.reach())))
            .transpose()?;
        // Replayed over a newer store, it would bring back keys that were deleted.
        let chain = chain.filter(|(_, reach)| reach.end.seq >= newest.max(log.newest));
        if let Some((start, Reach { end: _, damaged: false })) = chain
            && start.position == 0
        {
            let found = Some(FoundState { complete: true });
            return Ok(Self {
                salvage: Err(lost),
                start: Some(start),
                found,
                history: true,
                newest,
            });
        }
        let mut source = Self { newest, ..Self::named(named) };
        let reach =
            source.start.and_then(|point| log.replay(point).ok()).map(|replayed| replayed.reach());
        let mut states = Vec::new();
        for (keys, state) in search.states.clone() {
            let (weight, reach) = (search.weigh(&keys), log.replay(state.point)?.reach());
            states.push(State { keys, state, weight, reach });
        }
        let tree = source.salvage.as_ref().ok().map(|salvage| &salvage.keys);
        let tree = tree.filter(|keys| search.has_root(keys)).cloned();
        let named =
            tree.map(|keys| (search.weigh(&keys).entries, reach.map(|reach| reach.end.seq)));
        let ends_with = chain.map(|(_, reach)| reach.end);
        if let Some((state, complete)) = choose(states, named, ends_with) {
            let salvage = Ok(Salvage::found(file, state.keys, Ok(state.state)));
            let found = Some(FoundState { complete });
            return Ok(Self { salvage, start: Some(state.state.point), found, ..source });
        }
        if named.is_none() {
            if let Some((keys, _)) = search.best_root() {
                source.salvage = Ok(Salvage::found(file, keys, Err(lost)));
            }
            let found = Some(FoundState { complete: false });
            return Ok(Self { start: chain.map(|(start, _)| start), found, ..source });
        }
        if let (Some((start, of_chain)), Some(point)) = (chain, source.start)
            && start.position <= point.position
            && reach.is_some_and(|reach| reach.end == of_chain.end)
        {
            source.start = Some(start);
        }
        if source.start.is_none() {
            source.start = chain.map(|(start, _)| start);
            source.found = Some(FoundState { complete: false });
        }
        Ok(source)
    }
}

/// A state of the store that was found.
struct State {
    keys: Tree,
    state: HomeState,
    weight: Weight,
    reach: Reach,
}

/// The state that is to be taken, and whether nothing is missing; `None`: what the store names, or
/// nothing. Of what it names, `named` says how many keys are left, and to which context the log
/// leads from there; `log_end` is where the log ends, if it says what happened last. The newest
/// state comes first.
fn choose(
    mut states: Vec<State>,
    named: Option<(u64, Option<Seq>)>,
    log_end: Option<Point>,
) -> Option<(State, bool)> {
    let whole = |state: &State| state.weight.damaged == 0;
    let to_end = |state: &State| !state.reach.damaged && log_end == Some(state.reach.end);
    if let Some(at) = states.iter().position(|state| whole(state) && to_end(state)) {
        return Some((states.swap_remove(at), true));
    }
    let of_named = named.and_then(|(_, seq)| seq);
    let furthest = states.iter().map(|state| state.reach.end.seq).chain(of_named).max()?;
    let far = |state: &State| state.reach.end.seq == furthest;
    let at = match states.iter().position(|state| whole(state) && far(state)) {
        Some(at) => at,
        None if of_named == Some(furthest) => return None,
        None => {
            let newest = states.iter().position(far)?;
            let older = states.iter().position(whole).unwrap_or(newest);
            if states[older].weight.entries > states[newest].weight.entries {
                older
            } else {
                newest
            }
        }
    };
    // Of unknown age: it is the newest that the header knew.
    let more = named.is_some_and(|(keys, seq)| seq.is_none() && keys >= states[at].weight.entries);
    (!more).then(|| (states.swap_remove(at), false))
}

/// How far the log leads.
#[derive(Clone, Copy)]
struct Reach {
    end: Point,
    damaged: bool,
}

impl Replay {
    fn reach(&self) -> Reach {
        Reach { end: self.end, damaged: self.damage.is_some() }
    }
}

/// What there is to be read.
struct Old {
    file: Option<Arc<HomeFile>>,
    source: Source,
    /// What the log says happened.
    changes: Changes,
    log_damage: Option<LogDamage>,
    /// Where the log goes on: behind everything that any block of it says.
    end: Point,
}

impl Old {
    fn open(
        disk: &Arc<Disk>,
        geo: &Geometry,
        area: &LogArea,
        env: &Env,
    ) -> Result<Self, JournalError> {
        disk.flush_wait().map_err(io_error("log"))?;
        let Beyond { position, seq: newest, unreadable } = beyond(disk, area);
        let opened = HomeFile::open(disk, geo, Opening { read_only: true, in_order: true });
        let at_rest = opened.as_ref().is_ok_and(|file| file.is_at_rest());
        let log = Log { disk, area, newest, at_rest, env };
        let (file, source) = match opened {
            Ok(file) => {
                let named = Salvage::open(&file);
                let whole =
                    named.as_ref().is_ok_and(|named| named.state.is_ok() && named.is_whole());
                let source =
                    if whole { Source::named(named) } else { Source::search(&file, named, &log)? };
                (Some(file), source)
            }
            Err(error) => (None, Source::named(Err(error))),
        };
        // What begins at 0 is all that ever happened: only a new volume's log does.
        let seq = Seq(newest.max(source.newest).0 + unreadable);
        // Blocks that cannot be read may be of later positions: those of the ring, if it ends with
        // them.
        let unseen = if unreadable > 0 { area.blocks } else { 0 };
        let mut end = Point { seq, position: position.max(1) + unseen, id: env.entropy.next_u64() };
        let (changes, log_damage) = match source.start {
            Some(start) => {
                let replayed = log.replay(start)?;
                end.seq = end.seq.max(replayed.end.seq);
                end.position = end.position.max(replayed.end.position);
                (replayed.changes, replayed.damage)
            }
            // Nothing of it can be told from what is older than the home store.
            None => {
                let lost = LogDamage {
                    offset: area.offset,
                    detail: "where it begins is not known".into(),
                    unreadable: None,
                    lost_from: Seq(1),
                    lost_to: newest,
                };
                (Changes::new(), Some(lost))
            }
        };
        Ok(Self { file, source, changes, log_damage, end })
    }

    /// Segments that surely suffice.
    fn needed(&self, unit: u64) -> u32 {
        let log: u64 = self
            .changes
            .iter()
            .map(|(k, c)| (k.len() + c.as_ref().map_or(0, |v| v.len())) as u64)
            .sum();
        let attached = self.file.as_ref().map_or(0, |file| file.attached());
        (attached as u64 + (2 * log).div_ceil(unit)) as u32 + SPARE as u32
    }
}
