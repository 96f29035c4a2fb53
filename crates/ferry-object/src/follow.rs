//! [`Follower`]: what a volume is while its owner goes on, for reading only, from any machine.
//!
//! Nothing is claimed and nothing is written. The rules:
//!
//! * FOLLOW-1: a *version* is the newest root with the log behind it, up to the first gap. A new
//!   owner would find the same, so it is what a crash would leave, and it has all that was
//!   acknowledged before the look began.
//! * FOLLOW-2: names in the log are deleted in ascending order, and only those before the newest
//!   root's first one. So what was followed before is still right from that number on, and only
//!   from there on: a name before it may have been taken again by an owner that slept.
//! * FOLLOW-3: what a look rests on may be deleted when a grace has passed, and no clock tells that
//!   for certain: a machine sleeps or is paused. A look ends by finding that its root is still the
//!   newest one. The log is looked at before, so nothing in there was deleted until then.
//! * FOLLOW-4: a rollback is one root, with the map of an older one. It begins another *timeline*
//!   of the volume, in which numbers of inodes may mean other files. If a root between two versions
//!   cannot be read any more, there may have been one. A backup does not
//!   tell: whether the volume that it brings was rolled back, that volume itself says.

use crate::access::{Access, Patience};
use crate::cache::DiskCache;
use crate::device::{Limits, ObjectDevice, identified};
use crate::error::ObjectError;
use crate::executor::Executor;
use crate::format::{
    BEATS, Claim, Kind, Location, ObjectRef, RootState, beat_name, beat_of, log_name,
};
use crate::keys::Passphrase;
use crate::runs::Run;
use crate::small::SmallObjects;
use crate::store::Store;
use crate::volume::{
    Chain, Followed, FoundRoot, Shards, Volume, is_newest_root, load_shards, newest_claim,
    newest_whole_root, read_root, read_super,
};
use ferry_env::Env;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use zeroize::Zeroizing;

/// For how long a store that does not answer is asked by one look, and by one read.
const PATIENCE: Duration = Duration::from_secs(10);
/// From so many tries on a version is taken whose root is not the newest one any more.
const TRIES: u32 = 3;

/// A version of a volume.
pub struct Version {
    /// Reads as the volume was then. What a later root does not need is missing here once the owner
    /// has deleted it, a grace later.
    pub device: Arc<ObjectDevice>,
    /// The owner's epoch.
    pub epoch: u64,
    /// The number of its root.
    pub root: u64,
    /// The first number in the log that it lacks.
    pub log: u64,
    /// Its owner has closed it.
    pub closed: bool,
    /// It is in another timeline of the volume than the version before it (FOLLOW-4).
    pub new_timeline: bool,
}

/// Who owns a volume.
pub(crate) struct Owned {
    pub epoch: u64,
    /// For people.
    pub name: String,
    /// It writes a heartbeat.
    pub beats: bool,
}

/// What a follower has seen last.
struct Seen {
    chain: Arc<Chain>,
    shards: HashMap<(u64, ObjectRef), Arc<[Run<Location>]>>,
}

impl Seen {
    fn epoch(&self) -> u64 {
        let root = self.chain.root.header.epoch;
        self.chain.links.last().map_or(root, |link| link.header.epoch.max(root))
    }

    /// Its owner has closed it.
    fn is_closed(&self) -> bool {
        self.chain.root.root.state == RootState::Closed && self.chain.links.is_empty()
    }
}

/// Follows a volume. The module's documentation has the rules.
pub struct Follower {
    access: Access,
    volume: Volume,
    limits: Limits,
    env: Env,
    cache: Option<Arc<DiskCache>>,
    seen: Option<Seen>,
    /// The root that another process had seen last, from which this one goes on.
    before: Option<u64>,
    /// Bytes of small objects of the log in memory, at most.
    remembered_max: usize,
}

impl Follower {
    /// Follows the volume in a store.
    pub fn open(
        store: Arc<dyn Store>,
        executor: Arc<dyn Executor>,
        passphrase: Option<&Passphrase>,
        limits: Limits,
        env: &Env,
    ) -> Result<Self, ObjectError> {
        let (access, volume) = identified(store, executor, passphrase, limits, env)?;
        Ok(Self::new(access, volume, None, limits, env))
    }

    /// The same of a volume that was identified. A cache is used by the devices of all versions.
    pub(crate) fn new(
        mut access: Access,
        volume: Volume,
        cache: Option<DiskCache>,
        limits: Limits,
        env: &Env,
    ) -> Self {
        access.patience = Patience::Opening(PATIENCE.min(limits.patience));
        let limits = Limits { holds: false, ..limits };
        Self {
            access,
            volume,
            limits,
            env: env.clone(),
            cache: cache.map(Arc::new),
            seen: None,
            before: None,
            remembered_max: SmallObjects::BYTES_MAX,
        }
    }

    /// Has so many bytes of small objects of the log in memory, for who recovers the volume behind
    /// this follower.
    pub(crate) fn remember(&mut self, bytes_max: usize) {
        self.remembered_max = bytes_max;
    }

    /// What was read of the log, for a claimant.
    pub fn followed(&self) -> Followed {
        Followed(self.seen.as_ref().map(|seen| Arc::clone(&seen.chain)))
    }

    /// Goes on from this root, which another process has seen last: the first look tells whether
    /// its version is in another timeline.
    pub fn goes_on_from(&mut self, root: u64) {
        self.before = Some(root);
    }

    /// The key of an encrypted volume, for [`Passphrase::of_key`].
    pub fn key(&self) -> Option<Zeroizing<Vec<u8>>> {
        self.access.key()
    }

    /// Looks for a version that is newer than the last one. `anew`: that one is opened again, if
    /// there is none.
    pub fn look(&mut self, anew: bool) -> Result<Option<Version>, ObjectError> {
        let found = self.find_newer(anew)?.zip(self.seen.as_ref());
        Ok(found.map(|(new_timeline, seen)| self.opened(seen, new_timeline)))
    }

    /// The same, and no device is made of the version. Returns whether it is in another timeline.
    pub(crate) fn find_newer(&mut self, anew: bool) -> Result<Option<bool>, ObjectError> {
        if let Some(seen) = &self.seen
            && !anew
            && self.is_newest(&seen.chain)?
        {
            return Ok(None);
        }
        let (found, new_timeline) = self.read()?;
        self.seen = Some(found);
        Ok(Some(new_timeline))
    }

    /// The epoch of the version that was found last, and whether its owner has closed it.
    pub(crate) fn newest(&self) -> (u64, bool) {
        self.seen.as_ref().map_or((0, false), |seen| (seen.epoch(), seen.is_closed()))
    }

    /// The newest claim, if there is one.
    pub(crate) fn owner(&self) -> Result<Option<Owned>, ObjectError> {
        let root = newest_whole_root(&self.access, &self.volume)?;
        let newest = newest_claim(&self.access, &self.volume, &root)?;
        let owned = |(epoch, claim): (u64, Claim)| Owned {
            epoch,
            name: claim.owner.to_string(),
            beats: claim.beats,
        };
        Ok(newest.map(owned))
    }

    /// Whether this heartbeat is there.
    pub(crate) fn has_beat(&self, epoch: u64, number: u64) -> Result<bool, ObjectError> {
        self.access.exists(&beat_name(epoch, number))
    }

    /// The number of the newest heartbeat of an epoch.
    pub(crate) fn newest_beat(&self, epoch: u64) -> Result<Option<u64>, ObjectError> {
        let all = self.access.insist(|store| store.list(BEATS))?;
        let of_epoch = |(of, number)| (of == epoch).then_some(number);
        Ok(all.iter().filter_map(|name| beat_of(name)).filter_map(of_epoch).max())
    }

    pub(crate) fn now(&self) -> Duration {
        self.env.clock.monotonic_with_sleep()
    }

    /// Whether there is neither a newer root nor more in the log (FOLLOW-3).
    fn is_newest(&self, chain: &Chain) -> Result<bool, ObjectError> {
        Ok(!self.access.exists(&log_name(chain.next))?
            && is_newest_root(&self.access, &self.volume, &chain.root)?)
    }

    /// Reads the newest version. The owner may write a new root meanwhile, and delete what the old
    /// one needs: then this looks again.
    fn read(&self) -> Result<(Seen, bool), ObjectError> {
        let mut tries = 0;
        loop {
            let begun = self.env.clock.monotonic_with_sleep();
            if read_super(&self.access)?.id != self.volume.id {
                let what = "there is another volume in this store now".into();
                return Err(ObjectError::Setup(what));
            }
            let root = newest_whole_root(&self.access, &self.volume)?;
            let read = self.read_behind(root.clone());
            tries += 1;
            let took = self.env.clock.monotonic_with_sleep() - begun;
            // An owner may write roots as fast as they are read.
            let is_recent = tries >= TRIES && took < self.limits.grace / 2 && read.is_ok();
            if is_recent || is_newest_root(&self.access, &self.volume, &root)? {
                return read;
            }
        }
    }

    /// The version whose root this is, and whether it is in another timeline.
    fn read_behind(&self, root: FoundRoot) -> Result<(Seen, bool), ObjectError> {
        let before = self.seen.as_ref();
        let least = before.map(|seen| seen.chain.root.header.number).or(self.before);
        if least.is_some_and(|least| root.header.number < least) {
            let why = "a list names an older root than before".into();
            return Err(ObjectError::Unavailable(why));
        }
        let (mut shards, mut unknown) = (HashMap::new(), Vec::new());
        for at in &root.root.shards {
            match before.and_then(|seen| seen.shards.get(at)) {
                Some(runs) => drop(shards.insert(*at, Arc::clone(runs))),
                None => unknown.push(*at),
            }
        }
        let loaded = load_shards(&self.access, &self.volume, &unknown)?;
        shards.extend(unknown.into_iter().zip(loaded.into_iter().map(Arc::from)));
        let new_timeline = match (before, self.before) {
            (Some(seen), _) => self.has_new_timeline(&seen.chain, &root)?,
            (None, Some(number)) => match read_root(&self.access, &self.volume, number) {
                Err(ObjectError::NotFound(_)) => true,
                seen => self.has_new_timeline(&Chain::new(seen?), &root)?,
            },
            (None, None) => false,
        };
        let read = Some(SmallObjects::of_at_most(self.remembered_max));
        let mut chain = Chain { read, ..Chain::new(root) };
        if let Some(seen) = before {
            chain.take_from(&seen.chain);
        }
        chain.follow(&self.access, &self.volume, None)?;
        Ok((Seen { chain: Arc::new(chain), shards }, new_timeline))
    }

    /// Whether one of the roots behind that of `seen`, up to `newest`, was a rollback.
    fn has_new_timeline(&self, seen: &Chain, newest: &FoundRoot) -> Result<bool, ObjectError> {
        let mut before = seen.root.clone();
        for number in before.header.number + 1..=newest.header.number {
            let root = match read_root(&self.access, &self.volume, number) {
                Err(ObjectError::NotFound(_)) => return Ok(true),
                root => root?,
            };
            if self.is_rollback(seen, &before, &root)? {
                return Ok(true);
            }
            before = root;
        }
        Ok(false)
    }

    /// Whether a root has not what the one `before` it and the log say, but the map of a snapshot.
    /// An owner that changes a block makes a new map of its shard, so no other root has an old map
    /// again.
    fn is_rollback(
        &self,
        seen: &Chain,
        before: &FoundRoot,
        root: &FoundRoot,
    ) -> Result<bool, ObjectError> {
        if root.root.state != RootState::Closed {
            return Ok(false);
        }
        let is_that_of = |pin: u64| match read_root(&self.access, &self.volume, pin) {
            Ok(pinned) => Ok(pinned.root.shards == root.root.shards),
            Err(ObjectError::NotFound(_)) => Ok(false),
            Err(error) => Err(error),
        };
        let mut has_old_map = false;
        for pin in root.root.pins.iter().filter(|pin| pin.root < root.header.number) {
            has_old_map = has_old_map || is_that_of(pin.root)?;
        }
        if !has_old_map || before.root.shards != root.root.shards {
            return Ok(has_old_map);
        }
        // The map is the same as before: something was lost if the log had changed it, or may have
        // been if that is deleted.
        let mut chain = Chain::new(before.clone());
        chain.take_from(seen);
        chain.follow(&self.access, &self.volume, None)?;
        let mut lost = chain.links.iter().take_while(|link| link.seq < root.root.first);
        Ok(chain.next < root.root.first || lost.any(|link| link.header.kind == Kind::Log))
    }

    fn opened(&self, found: &Seen, new_timeline: bool) -> Version {
        let root = &found.chain.root;
        let shards: Shards = root.root.shards.iter().map(|at| found.shards[at].to_vec()).collect();
        Version {
            epoch: found.epoch(),
            root: root.header.number,
            log: found.chain.next,
            closed: found.is_closed(),
            new_timeline,
            device: ObjectDevice::version(
                self.access.clone(),
                (self.volume.clone(), Chain::clone(&found.chain), shards),
                self.cache.clone(),
                self.limits,
                &self.env,
            ),
        }
    }
}
