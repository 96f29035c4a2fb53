//! A backup: a volume that has snapshots of another one.
//!
//! It has the id of the volume that it backs up, its key, and the same objects under the same
//! names. So an object is copied as it is, and one that is there already is not copied again. Each
//! backup is made by an owner of the target, which no other owner can be beside:
//!
//! * BACKUP-1: the owner ends with one root that has the shards of the snapshot, and names it. That
//!   root is the whole change: it is sent after all that it needs has answered. So a backup that is
//!   cut off is not there, and what it had copied is found by the next one.
//! * BACKUP-2: an object is sent only after all its bytes were verified. Before the root is sent,
//!   the names of all objects are made durable, and its map is read from the target.
//!   Behind the root the target is listed again, and what is missing is sent: an older owner that
//!   slept may have deleted it.
//! * BACKUP-3: an object of the target counts as copied if it has the right length, and either a
//!   snapshot of the target needs it, or its header, read by its name, is the same: a list may lag.
//!   Of what a snapshot of the target needs, one header of each epoch and that of the last log
//!   object are compared for each of these snapshots: a source that somebody has set back, with a
//!   copy of its store, writes other objects under names that it had used, and the target may have
//!   snapshots of both.
//! * BACKUP-4: no owner of the target writes an object under a name that an owner of the source
//!   has written, or will write. The first root of the target has an epoch and a first log object
//!   far behind those of the source, by a random distance: both volumes may be used, and share a
//!   cache.
//! * BACKUP-5: a target whose map an owner of its own has changed is refused: the change would be
//!   lost.
//! * BACKUP-6: names of the source lie behind none of the target's. A volume that was restored from
//!   a target, or from a backup of it, is refused there: an object of it would be newer than each
//!   pin, and so none that a snapshot needs.

use crate::access::{Access, Created, Patience, sizes};
use crate::device::{Limits, ObjectDevice, identified};
use crate::error::ObjectError;
use crate::executor::{Answer, Executor, Job};
use crate::format::{
    Front, HEADER_LEN, Id, Kind, LOGS, ObjectRef, Pin, Root, RootState, SHARDS, SUPER, claim_name,
    encode_root, header, new_header, root_name, shard_name,
};
use crate::keys::{Passphrase, newest_key, take_key};
use crate::pins::no_snapshot;
use crate::snapshots::{Pinned, RootChange, refuse};
use crate::store::Store;
use crate::volume::{Claimant, Volume, claim_of, load_shard, load_shards, newest_root, read_root};
use ferry_env::{Env, Utc};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::ControlFlow;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// Objects that are copied at a time, at most.
const COPIES_MAX: usize = 12;
/// Their bytes, at most, if they are several.
const COPY_BYTES_MAX: u64 = 64 << 20;
/// An object that somebody deletes while it is made is made so often.
const CREATES_MAX: u32 = 3;
/// The epochs of a target begin at least so far behind the source's.
const EPOCHS_BEHIND: u64 = 1 << 20;
/// The random part of that distance is shorter than 2^50.
const RANDOM_SHIFT: u32 = 14;

/// Why a backup was not made. The target is what it was, but for objects that nothing names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackupError {
    /// The volume, or its store.
    #[error(transparent)]
    Source(ObjectError),
    /// The store that gets the backup.
    #[error("{0}")]
    Target(ObjectError),
    /// The snapshot of this name was deleted meanwhile.
    #[error("the snapshot {0:?} was deleted while it was copied")]
    Deleted(String),
    /// The target has another volume.
    #[error("there is another volume here, which is left alone")]
    OtherVolume,
    /// The target is what somebody has made of a backup.
    #[error("it is a volume of its own since {since} ({owner})")]
    OwnVolume {
        /// When it was claimed.
        since: String,
        /// By whom, in words.
        owner: String,
    },
    /// The volume was restored from the target, or from a backup of it.
    #[error("its object names are ahead of this target")]
    Ahead,
    /// The target has an object of this name that is damaged. That of the volume is whole.
    #[error("the object {0} is damaged here, and whole in the volume")]
    Differs(String),
    /// The target has another object of this name.
    #[error(
        "the object {0} is another one here than in the volume, which was set back with a copy of its store, or is such a copy"
    )]
    Forked(String),
    /// The caller did not want to go on.
    #[error("stopped")]
    Stopped,
}

/// How far a backup is: objects and their bytes, as they are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copying {
    /// Copied.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// To be copied in all.
    pub objects_total: u64,
    /// Their bytes.
    pub bytes_total: u64,
}

/// What a backup did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackedUp {
    /// The target has the snapshot since now.
    Copied {
        /// What was copied.
        objects: u64,
        /// Its bytes.
        bytes: u64,
        /// What the snapshot needs.
        objects_total: u64,
        /// Its bytes.
        bytes_total: u64,
    },
    /// The target had it before.
    WasThere,
}

/// A volume whose snapshots are backed up. It may be in use.
pub struct BackupSource {
    access: Access,
    volume: Volume,
}

/// An object that a snapshot needs.
#[derive(Clone, Copy, Debug)]
enum Needed {
    Shard(u64, ObjectRef),
    Object(ObjectRef),
}

impl Needed {
    fn name(self) -> String {
        match self {
            Self::Shard(shard, at) => shard_name(shard, at),
            Self::Object(at) => at.name(),
        }
    }

    /// Refuses bytes that are not all of this object.
    fn verify(self, access: &Access, volume: &Id, bytes: &[u8]) -> Result<(), ObjectError> {
        let front = Front::decode(&access.codec, &self.name(), bytes)?;
        let front = match self {
            Self::Shard(_, at) => front.expect(Kind::Shard, volume, at.number)?,
            Self::Object(at) => front.expect_object(at, volume)?,
        };
        front.verify(bytes)
    }
}

/// An object that the target may lack.
struct Task {
    needed: Needed,
    bytes: u64,
    how: How,
}

/// What is done about an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// The target has one of this name and length: it must have the same header.
    Compare,
    /// The target has one of this name and another length.
    Explain,
    Copy,
}

/// What the snapshots of the target need.
#[derive(Default)]
struct Known {
    all: Pinned,
    /// The shards of each snapshot.
    pins: Vec<Vec<ObjectRef>>,
    /// What each shard needs.
    of_shards: BTreeMap<ObjectRef, BTreeSet<ObjectRef>>,
}

impl Known {
    /// Of each snapshot of the target the last object and the last shard of each epoch that are
    /// trusted; of log objects, which have none, the last one. All that is of one snapshot is of
    /// one history of the volume. An object of one history may have the number of a shard of
    /// another.
    fn samples(&self, trusted: &BTreeMap<(Kind, ObjectRef), Needed>) -> Vec<Needed> {
        let of_shards: BTreeMap<ObjectRef, Lasts> =
            self.of_shards.keys().map(|shard| (*shard, self.lasts(*shard, trusted))).collect();
        let mut samples = BTreeSet::new();
        for shards in &self.pins {
            let mut lasts = Lasts::new();
            let of_pin = shards.iter().filter_map(|shard| of_shards.get(shard)).flatten();
            for ((kind, epoch), number) in of_pin {
                let last = lasts.entry((*kind, *epoch)).or_default();
                *last = (*number).max(*last);
            }
            let ends = lasts.into_iter();
            samples.extend(ends.map(|((kind, epoch), number)| (kind, ObjectRef { epoch, number })));
        }
        samples.iter().filter_map(|sample| trusted.get(sample)).copied().collect()
    }

    /// The last numbers of what a shard needs, and of itself, if they are trusted.
    fn lasts(&self, shard: ObjectRef, trusted: &BTreeMap<(Kind, ObjectRef), Needed>) -> Lasts {
        let objects = self.of_shards.get(&shard).into_iter().flatten();
        let all = objects.map(|at| (Kind::Data, *at)).chain([(Kind::Shard, shard)]);
        let mut lasts = Lasts::new();
        for (kind, at) in all.filter(|found| trusted.contains_key(found)) {
            let last = lasts.entry((kind, at.epoch)).or_default();
            *last = at.number.max(*last);
        }
        lasts
    }
}

/// The last number of each kind in each epoch.
type Lasts = BTreeMap<(Kind, u64), u64>;

/// A task that has ended: the bytes that were copied.
type Ended = Result<Option<u64>, BackupError>;

impl BackupSource {
    /// The volume in a store.
    pub fn open(
        store: Arc<dyn Store>,
        executor: Arc<dyn Executor>,
        passphrase: Option<&Passphrase>,
        limits: Limits,
        env: &Env,
    ) -> Result<Self, ObjectError> {
        Self::identified(identified(store, executor, passphrase, limits, env)?)
    }

    /// One that was identified. A clone is refused: a part of its objects is another volume's.
    pub(crate) fn identified((access, volume): (Access, Volume)) -> Result<Self, ObjectError> {
        match volume.info.parents.last() {
            Some(parent) => Err(ObjectError::Setup(format!(
                "this is a clone, and the volume {:?} beside it has a part of its data: a clone \
                 cannot be backed up, so copy its files to another volume",
                parent.name
            ))),
            None => Ok(Self { access, volume }),
        }
    }

    /// Whether a process has begun to make a target for this volume in a store, and has not come to
    /// `super`.
    pub(crate) fn has_begun(&self, target: &Access) -> Result<bool, BackupError> {
        let first_root = || match target.exists(SUPER)? {
            true => Ok(None),
            false => target.header(&root_name(0)),
        };
        let found = first_root().map_err(BackupError::Target)?;
        Ok(found.is_some_and(|root| root.volume == self.volume.id))
    }

    /// Opens the target to own it. In a store that has no volume it is made first: a volume whose
    /// device reads as zeros.
    pub fn open_target(
        &self,
        store: Arc<dyn Store>,
        executor: Arc<dyn Executor>,
        claimant: &Claimant,
        limits: Limits,
        env: &Env,
    ) -> Result<Arc<ObjectDevice>, BackupError> {
        let mut access = Access::new(store, executor, Patience::Opening(limits.patience), env);
        access.codec = self.access.codec.clone();
        self.make_target(&access, env)?;
        let volume = Volume { epoch: 0, ..self.volume.clone() };
        let newest = newest_root(&access, &volume).map_err(BackupError::Target)?;
        refuse_own(&access, &volume, newest.root.shards.iter().map(|(_, at)| *at))?;
        let of = newest_root(&self.access, &self.volume).map_err(BackupError::Source)?;
        // The owner of the target gets a later epoch, and its log goes on behind that root.
        if of.header.epoch >= newest.header.epoch || of.root.first >= newest.root.first {
            return Err(BackupError::Ahead);
        }
        let claimant = Claimant { backs_up: true, ..claimant.clone() };
        let device = ObjectDevice::claim_identified(access, volume, &claimant, limits, env)
            .map_err(BackupError::Target)?;
        // What the last owner did may be in the log.
        let refused = device.refuse_changed().and_then(|()| self.give_keys(&device.access));
        if refused.is_err()
            && let Err(error) = device.close()
        {
            tracing::warn!(%error, "the target is not marked as closed in its store");
        }
        refused.map(|()| device)
    }

    /// Makes the target if there is none. `super` comes last: with it the volume is there.
    fn make_target(&self, to: &Access, env: &Env) -> Result<(), BackupError> {
        let bytes = self.access.get(SUPER, None).map_err(BackupError::Source)?;
        match to.get(SUPER, None) {
            Err(ObjectError::NotFound(_)) => {}
            Ok(found) if found == bytes => return Ok(()),
            Ok(_) => return Err(BackupError::OtherVolume),
            Err(error) => return Err(BackupError::Target(error)),
        }
        self.make_first_root(to, env)?;
        self.give_keys(to)?;
        match to.create(SUPER, &bytes).map_err(BackupError::Target)? {
            Created::Ours => Ok(()),
            Created::Foreign(_) | Created::Vanished => Err(BackupError::OtherVolume),
        }
    }

    /// The passphrases of the volume open the target.
    fn give_keys(&self, to: &Access) -> Result<(), BackupError> {
        if !self.volume.info.encrypted {
            return Ok(());
        }
        let (number, bytes) = newest_key(&self.access).map_err(BackupError::Source)?;
        take_key(to, number, &bytes).map_err(BackupError::Target)
    }

    fn make_first_root(&self, to: &Access, env: &Env) -> Result<(), BackupError> {
        let newest = newest_root(&self.access, &self.volume).map_err(BackupError::Source)?;
        let random = || env.entropy.next_u64() >> RANDOM_SHIFT;
        let root = Root {
            first: newest.root.first + Root::LOGS_BEHIND + random(),
            last_id: [0; 16],
            state: RootState::Closed,
            shards: Vec::new(),
            pins: Vec::new(),
        };
        let epoch = newest.header.epoch + EPOCHS_BEHIND + random();
        let header = new_header(Kind::Root, self.volume.id, epoch, 0, env);
        let bytes = encode_root(&to.codec, &header, &root);
        match to.create(&root_name(0), &bytes).map_err(BackupError::Target)? {
            Created::Ours => Ok(()),
            // A process that did not come to `super` has made it.
            Created::Foreign(found) if found.volume == self.volume.id => Ok(()),
            Created::Foreign(_) | Created::Vanished => Err(BackupError::OtherVolume),
        }
    }

    /// An error if the volume has no snapshot of this name.
    pub fn check(&self, name: &str) -> Result<(), ObjectError> {
        self.snapshot(name).map(drop)
    }

    /// The snapshot of this name, and its root.
    fn snapshot(&self, name: &str) -> Result<(Pin, Root), ObjectError> {
        let mut pins = newest_root(&self.access, &self.volume)?.root.pins;
        pins.retain(|pin| !pin.is_of_clone());
        let Some(at) = pins.iter().position(|pin| pin.name == name) else {
            return Err(no_snapshot(name, &pins));
        };
        let pin = pins.swap_remove(at);
        let root = read_root(&self.access, &self.volume, pin.root)?.root;
        Ok((pin, root))
    }

    /// All that the root of a snapshot needs.
    fn needs(&self, root: &Root) -> Result<Pinned, ObjectError> {
        let mut needs = Pinned::default();
        for (shard, at) in &root.shards {
            let runs = load_shard(&self.access, &self.volume, *shard, *at)?;
            needs.objects.extend(runs.iter().map(|run| run.value.object));
            needs.shards.insert(*at);
        }
        Ok(needs)
    }

    /// Why the source cannot be read: its snapshot may have been deleted.
    fn explained(&self, pin: &Pin, error: ObjectError) -> BackupError {
        let missing = matches!(error, ObjectError::NotFound(_) | ObjectError::Damaged { .. });
        match missing.then(|| self.still_has(pin)) {
            Some(Err(deleted)) => deleted,
            _ => BackupError::Source(error),
        }
    }

    /// An error if the snapshot was deleted.
    fn still_has(&self, pin: &Pin) -> Result<(), BackupError> {
        let newest = newest_root(&self.access, &self.volume).map_err(BackupError::Source)?;
        match newest.root.pins.contains(pin) {
            true => Ok(()),
            false => Err(BackupError::Deleted(pin.name.clone())),
        }
    }
}

/// Refuses a target whose map an owner of its own has written: claims of the source's owners are
/// not there.
fn refuse_own(
    access: &Access,
    volume: &Volume,
    shards: impl Iterator<Item = ObjectRef>,
) -> Result<(), BackupError> {
    match claimed_epoch(access, shards).map_err(BackupError::Target)? {
        Some(epoch) => Err(own_volume(access, volume, epoch)),
        None => Ok(()),
    }
}

/// An epoch of one of these shards that was claimed in this store. None: they were copied from the
/// stores of other volumes, with all that they have.
pub(crate) fn claimed_epoch(
    access: &Access,
    shards: impl Iterator<Item = ObjectRef>,
) -> Result<Option<u64>, ObjectError> {
    let epochs: BTreeSet<u64> = shards.map(|at| at.epoch).collect();
    for epoch in epochs {
        if access.exists(&claim_name(epoch))? {
            return Ok(Some(epoch));
        }
    }
    Ok(None)
}

fn own_volume(access: &Access, volume: &Volume, epoch: u64) -> BackupError {
    match claim_of(access, volume, epoch) {
        Ok(claim) => BackupError::OwnVolume {
            since: Utc::from_secs(claim.made_secs).to_string(),
            owner: claim.owner.to_string(),
        },
        Err(error) => BackupError::Target(error),
    }
}

/// All that a snapshot needs, but for its root.
fn each<'a>(root: &'a Root, needs: &'a Pinned) -> impl Iterator<Item = Needed> + 'a {
    let objects = needs.objects.iter().map(|at| Needed::Object(*at));
    objects.chain(root.shards.iter().map(|(shard, at)| Needed::Shard(*shard, *at)))
}

/// Where the objects are that a snapshot may need, but for its root.
const NEEDED: [&str; 3] = [SHARDS, ObjectRef::DATA, LOGS];

impl ObjectDevice {
    /// Refuses a target that the owner before this one has changed.
    fn refuse_changed(&self) -> Result<(), BackupError> {
        let state = self.state.lock();
        let shards: Vec<ObjectRef> = state.roots.shards.values().copied().collect();
        let has_changed = state.map.has_changed();
        drop(state);
        if has_changed {
            return Err(own_volume(&self.access, &self.volume, self.volume.epoch - 1));
        }
        refuse_own(&self.access, &self.volume, shards.into_iter())
    }

    /// Copies a snapshot of the source to this volume, the target, and closes it. `tell` hears how
    /// far it is, and says whether to go on.
    pub fn back_up(
        &self,
        source: &Arc<BackupSource>,
        name: &str,
        tell: &mut dyn FnMut(Copying) -> ControlFlow<()>,
    ) -> Result<BackedUp, BackupError> {
        let target = BackupError::Target;
        let (pin, root) = source.snapshot(name).map_err(BackupError::Source)?;
        let pins = self.state.lock().roots.pins.clone();
        let old = pins.iter().find(|old| old.name == name);
        if let Some(old) = old {
            let there = read_root(&self.access, &self.volume, old.root).map_err(target)?.root;
            if old.made_secs != pin.made_secs || there.shards != root.shards {
                return Err(target(ObjectError::SnapshotExists(name.into())));
            }
        }
        let was_there = old.is_some();
        if !was_there {
            let receive = RootChange::Receive { pin: &pin, of: &root };
            refuse(&self.state.lock(), &receive).map_err(target)?;
        }
        let needs = source.needs(&root).map_err(|error| source.explained(&pin, error))?;
        let known = self.known(&pins).map_err(target)?;
        let (tasks, mut done) = self.tasks(source, &root, &needs, &known)?;
        let copied = self.copy(source, &pin, tasks, tell)?;
        (done.objects, done.bytes) = (copied.objects, copied.bytes);
        let durable = self
            .access
            .insist(|store| store.make_durable(&mut each(&root, &needs).map(Needed::name)));
        durable.map_err(target)?;
        self.refuse_damaged(&root)?;
        source.still_has(&pin)?;
        if was_there {
            // What it needs is compared, and brought if it is missing.
            self.bring_lost(source, &pin, each(&root, &needs), tell)?;
            return Ok(BackedUp::WasThere);
        }
        let all: Vec<Needed> = each(&root, &needs).collect();
        // What deleted snapshots needed, and what was copied of one that is deleted now.
        let mut needed = known.all;
        needed.objects.extend(needs.objects);
        needed.shards.extend(needs.shards);
        if let Err(error) = self.sweep(&needed) {
            tracing::warn!(%error, "objects that nothing needs stay until the next backup");
        }
        self.end(RootChange::Receive { pin: &pin, of: &root }).map_err(target)?;
        // An owner that slept may have taken the name of a root that later owners deleted.
        self.look().map_err(target)?;
        let brought = self.bring_lost(source, &pin, all.into_iter(), tell)?;
        (done.objects, done.bytes) = (done.objects + brought.objects, done.bytes + brought.bytes);
        let Copying { objects, bytes, objects_total, bytes_total } = done;
        Ok(BackedUp::Copied { objects, bytes, objects_total, bytes_total })
    }

    /// Brings what was deleted meanwhile: an owner before this one may have slept, and have found
    /// that nothing needs it before this one was there.
    fn bring_lost(
        &self,
        source: &Arc<BackupSource>,
        pin: &Pin,
        all: impl Iterator<Item = Needed>,
        tell: &mut dyn FnMut(Copying) -> ControlFlow<()>,
    ) -> Result<Copying, BackupError> {
        let there = sizes(&self.access, &NEEDED).map_err(BackupError::Target)?;
        // A list may lag, so those are read by their names first.
        let task = |needed| Task { needed, bytes: 0, how: How::Compare };
        let lost: VecDeque<Task> =
            all.filter(|needed| !there.contains_key(&needed.name())).map(task).collect();
        match lost.is_empty() {
            true => Ok(Copying::default()),
            false => self.copy(source, pin, lost, tell),
        }
    }

    /// Refuses a map that nobody could open in this volume, the target: a shard that it had before
    /// is compared by its header only.
    fn refuse_damaged(&self, root: &Root) -> Result<(), BackupError> {
        match load_shards(&self.access, &self.volume, &root.shards) {
            Err(ObjectError::Damaged { name, .. }) => Err(BackupError::Differs(name)),
            loaded => loaded.map(drop).map_err(BackupError::Target),
        }
    }

    /// What the snapshots of this volume, the target, need.
    fn known(&self, pins: &[Pin]) -> Result<Known, ObjectError> {
        let mut known = Known::default();
        for pin in pins {
            known.all.roots.insert(pin.root);
            let root = read_root(&self.access, &self.volume, pin.root)?.root;
            for (shard, at) in &root.shards {
                if known.all.shards.insert(*at) {
                    let runs = load_shard(&self.access, &self.volume, *shard, *at)?;
                    let objects: BTreeSet<_> = runs.iter().map(|run| run.value.object).collect();
                    known.all.objects.extend(&objects);
                    known.of_shards.insert(*at, objects);
                }
            }
            known.pins.push(root.shards.iter().map(|(_, at)| *at).collect());
        }
        Ok(known)
    }

    /// What the target may lack, and the numbers of all that the snapshot needs. `known`: what the
    /// snapshots of the target need.
    fn tasks(
        &self,
        source: &BackupSource,
        root: &Root,
        needs: &Pinned,
        known: &Known,
    ) -> Result<(VecDeque<Task>, Copying), BackupError> {
        let from = sizes(&source.access, &NEEDED).map_err(BackupError::Source)?;
        let there = sizes(&self.access, &NEEDED).map_err(BackupError::Target)?;
        let (mut tasks, mut all) = (VecDeque::new(), Copying::default());
        let mut trusted = BTreeMap::new();
        for needed in each(root, needs) {
            let name = needed.name();
            // One that the list does not have yet is short: it was made a short time ago.
            let size = from.get(&name).copied();
            let bytes = size.unwrap_or_default();
            (all.objects_total, all.bytes_total) = (all.objects_total + 1, all.bytes_total + bytes);
            let (key, is_known) = match needed {
                Needed::Shard(_, at) => ((Kind::Shard, at), known.all.shards.contains(&at)),
                Needed::Object(at) => ((Kind::Data, at), known.all.objects.contains(&at)),
            };
            match (size, there.get(&name)) {
                (Some(size), Some(found)) if *found != size => {
                    tasks.push_front(Task { needed, bytes, how: How::Explain });
                }
                (Some(_), Some(_)) if is_known => drop(trusted.insert(key, needed)),
                (Some(_), Some(_)) => tasks.push_back(Task { needed, bytes, how: How::Compare }),
                (Some(_) | None, _) => tasks.push_back(Task { needed, bytes, how: How::Copy }),
            }
        }
        for needed in known.samples(&trusted) {
            tasks.push_front(Task { needed, bytes: 0, how: How::Compare });
        }
        Ok((tasks, all))
    }

    /// Copies what the target lacks, several objects at a time.
    fn copy(
        &self,
        source: &Arc<BackupSource>,
        pin: &Pin,
        mut tasks: VecDeque<Task>,
        tell: &mut dyn FnMut(Copying) -> ControlFlow<()>,
    ) -> Result<Copying, BackupError> {
        let (ended, end) = mpsc::channel();
        let mut copying = Copying {
            objects_total: tasks.len() as u64,
            bytes_total: tasks.iter().map(|task| task.bytes).sum(),
            ..Copying::default()
        };
        let mut under_way = UnderWay::default();
        let mut copied = Copying::default();
        loop {
            if tell(copying).is_break() {
                return Err(BackupError::Stopped);
            }
            while tasks.front().is_some_and(|task| under_way.has_room(task.bytes)) {
                let Some(task) = tasks.pop_front() else { break };
                under_way.begin(task.bytes);
                self.start_copy(source, pin, task, ended.clone());
            }
            if under_way.count == 0 {
                return Ok(copied);
            }
            let Some((planned, result)) = self.access.ended(&end) else { continue };
            under_way.end(planned);
            copying.objects += 1;
            copying.bytes += planned;
            if let Some(bytes) = result? {
                copied.objects += 1;
                copied.bytes += bytes;
            }
        }
    }

    fn start_copy(
        &self,
        source: &Arc<BackupSource>,
        pin: &Pin,
        task: Task,
        ended: mpsc::Sender<(u64, Ended)>,
    ) {
        let (me, source, pin) = (self.me(), Arc::clone(source), pin.clone());
        let run = move || -> Answer {
            let result = me.copy_one(&source, &pin, &task);
            // Nobody listens any more if another copy has failed.
            Box::new(move || drop(ended.send((task.bytes, result))))
        };
        let job = Job { upload: None, after: Duration::ZERO, run: Box::new(run) };
        self.access.executor.start(job);
    }

    fn copy_one(&self, source: &BackupSource, pin: &Pin, task: &Task) -> Ended {
        let name = task.needed.name();
        let target = BackupError::Target;
        let explained = |error| source.explained(pin, error);
        let front = |access: &Access| access.get(&name, Some(0..HEADER_LEN as u64));
        let there = match task.how {
            How::Copy => None,
            How::Compare | How::Explain => match front(&self.access) {
                // It was deleted a short time ago.
                Err(ObjectError::NotFound(_)) => None,
                there => Some(there.map_err(target)?),
            },
        };
        if task.how == How::Compare
            && let Some(there) = &there
            && *there == front(&source.access).map_err(explained)?
        {
            return Ok(None);
        }
        let bytes = source.access.get(&name, None).and_then(|bytes| {
            task.needed.verify(&source.access, &source.volume.id, &bytes)?;
            Ok(bytes)
        });
        let bytes = bytes.map_err(explained)?;
        if let Some(there) = there {
            // The source's object is whole. So the other one is damaged, or not the same.
            let own = header(&name, &bytes).map_err(BackupError::Source)?;
            return match header(&name, &there) {
                Ok(other) if other.id != own.id => Err(BackupError::Forked(name)),
                _ => Err(BackupError::Differs(name)),
            };
        }
        for _ in 0..CREATES_MAX {
            match self.access.create(&name, &bytes).map_err(target)? {
                Created::Ours => return Ok(Some(bytes.len() as u64)),
                Created::Foreign(_) => return Err(BackupError::Forked(name)),
                // An owner that slept has deleted it.
                Created::Vanished => {}
            }
        }
        Err(target(ObjectError::Unavailable(format!(
            "{name}: somebody deletes it again and again"
        ))))
    }
}

/// Copies under way.
#[derive(Default)]
struct UnderWay {
    count: usize,
    bytes: u64,
}

impl UnderWay {
    fn has_room(&self, bytes: u64) -> bool {
        self.count == 0 || (self.count < COPIES_MAX && self.bytes + bytes <= COPY_BYTES_MAX)
    }

    fn begin(&mut self, bytes: u64) {
        self.count += 1;
        self.bytes += bytes;
    }

    fn end(&mut self, bytes: u64) {
        self.count -= 1;
        self.bytes -= bytes;
    }
}
