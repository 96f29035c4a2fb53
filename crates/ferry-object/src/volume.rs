//! Making a volume in a store, claiming one, and fencing its owner off.
//!
//! No clock takes part in who owns a volume. An owner that others believe dead may go on at any
//! time, so each step of a claimant is an object that the old owner would have to create, too:
//!
//! 1. the claim `e/(E+1)` decides between claimants;
//! 2. the takeover root `c/(N+1)` keeps the old owner from writing a root. Without a root it
//!    deletes nothing, so all that the new owner reads stays there;
//! 3. a fence far ahead (K + 2W) bounds how far the old owner can get, and the fence at the first
//!    gap stops it: what lies behind a gap was never acknowledged;
//! 4. a look for a newer claim, when the fences are in. A claimant may have slept for so long that
//!    the fence, which it created now, took the name of a log object that a later owner deleted.

use crate::access::{AT_ONCE, Access, Begun, Created, LIST_AGAIN, LISTS_MAX, Origin};
use crate::beats::Beats;
use crate::codec::{Codec, Compression, VolumeKey};
use crate::error::ObjectError;
use crate::format::{
    self, CLAIMS, Claim, Entry, Header, Id, Kind, Location, ObjectRef, Owner, Parent, ROOTS, Root,
    RootState, SUPER, Super, claim_name, decode_entries, decode_shard, encode, encode_super,
    log_name, new_header, number_of, random_id, root_name, shard_name,
};
use crate::keys::{Encryption, Of, Passphrase, make_key, unlock};
use crate::locks::Locks;
use crate::pins::{CloneName, for_people, no_snapshot};
use crate::runs::Run;
use crate::small::SmallObjects;
use ferry_device::Snapshot;
use ferry_env::Env;
use ferry_env::planted::{Bug, is_planted};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// W of a new volume: log objects that may be under way together.
const WINDOW_DEFAULT: u32 = 64;
/// So many owners that have not served are looked at, to find out whether all are dead.
const LOOK_BACK_MAX: u64 = 64;

/// What a new volume is to be.
#[derive(Clone, Debug)]
pub struct VolumeOptions {
    /// Bytes of the device, whole blocks.
    pub capacity: u64,
    /// Log objects that may be under way together.
    pub window: u32,
    /// Data objects end at this byte of the device, and every so many bytes behind it: a segment of
    /// the file system is never in one data object with another, so it dies as a whole.
    pub boundary: (u64, u64),
    /// Whether its owners compress what they write.
    pub compression: Compression,
    /// How it is encrypted, if it is.
    pub encryption: Option<Encryption>,
}

impl VolumeOptions {
    /// A volume of this size and with these boundaries, and the defaults.
    pub fn new(capacity: u64, boundary: (u64, u64)) -> Self {
        let compression = Compression::default();
        Self { capacity, window: WINDOW_DEFAULT, boundary, compression, encryption: None }
    }
}

/// What an open volume is.
#[derive(Clone, Debug)]
pub(crate) struct Volume {
    pub id: Id,
    pub info: Super,
    /// The owner's epoch; 0 if it is open for reading only.
    pub epoch: u64,
}

impl Volume {
    /// What its key belongs to.
    pub fn key_of(&self) -> Of<'_> {
        Of { id: &self.id, info: &self.info }
    }

    /// The number of the volume that has an object: this one, or one that it refers to.
    pub fn id_of(&self, object: ObjectRef) -> &Id {
        let parent = self.info.parent_of(object);
        parent.map_or(&self.id, |parent| &self.info.parents[parent].volume)
    }
}

/// The bytes of a root.
pub(crate) fn encode_root(
    codec: &Codec,
    volume: &Volume,
    number: u64,
    previous: Id,
    root: &Root,
    env: &Env,
) -> (Header, Vec<u8>) {
    let header =
        Header { previous, ..new_header(Kind::Root, volume.id, volume.epoch, number, env) };
    (header, format::encode_root(codec, &header, root))
}

/// Makes a volume in an empty store. Its device reads as zeros.
pub(crate) fn make(access: Access, options: &VolumeOptions, env: &Env) -> Result<(), ObjectError> {
    let info = Super {
        capacity: options.capacity,
        window: options.window,
        boundary: options.boundary,
        compression: options.compression,
        encrypted: options.encryption.is_some(),
        made_secs: env.clock.wall().as_secs(),
        parents: Vec::new(),
    };
    Super::decode(&info.encode())?;
    let header = new_header(Kind::Super, random_id(env), 0, 0, env);
    let is_new = match access.create(SUPER, &encode_super(&header, &info))? {
        Created::Ours => true,
        // Left by a process that ended before it wrote the first root, if nobody has opened it.
        Created::Foreign(_)
            if !access.exists(&claim_name(1))? && !access.exists(&root_name(0))? =>
        {
            false
        }
        Created::Foreign(_) | Created::Vanished => return Err(ObjectError::VolumeExists),
    };
    let volume = read_super(&access)?;
    if !is_new && has_later_root(&access, &volume)? {
        return Err(ObjectError::VolumeExists);
    }
    let access = match &options.encryption {
        _ if volume.info.encrypted != info.encrypted => return Err(ObjectError::VolumeExists),
        Some(encryption) => {
            let key = make_key(&access, volume.key_of(), encryption, env)?;
            access.with_key(VolumeKey::new(&key, &volume.id))
        }
        None => access,
    };
    let root = Root {
        first: 1,
        last_id: [0; 16],
        state: RootState::Closed,
        shards: Vec::new(),
        pins: Vec::new(),
    };
    let (_, bytes) = encode_root(&access.codec, &volume, 0, [0; 16], &root, env);
    access.create(&root_name(0), &bytes).map(drop)
}

/// Whether a volume that lacks its first root and first claim had the root: `super` of a clone or a
/// backup is made behind that, and their first claim has another number.
fn has_later_root(access: &Access, volume: &Volume) -> Result<bool, ObjectError> {
    let roots = || access.insist(|store| store.list(ROOTS));
    Ok(!volume.info.parents.is_empty() || roots()?.iter().any(|name| number_of(name) > Some(0)))
}

/// Reads what volume the store holds.
pub(crate) fn read_super(access: &Access) -> Result<Volume, ObjectError> {
    let (front, table) = match access.table(SUPER) {
        Err(ObjectError::NotFound(_)) => return Err(ObjectError::NoVolume),
        other => other?,
    };
    let id = front.header.volume;
    front.expect(Kind::Super, &id, 0)?;
    Ok(Volume { id, info: Super::decode(&table)?, epoch: 0 })
}

/// Reads what volume the store holds, and how to read and write its objects.
pub(crate) fn identify(
    mut access: Access,
    passphrase: Option<&Passphrase>,
) -> Result<(Access, Volume), ObjectError> {
    let volume = read_super(&access)?;
    let secret = match volume.info.encrypted {
        true => Some(unlock(&access, volume.key_of(), passphrase)?),
        false => None,
    };
    let codec_of = |id: &Id| Codec {
        compression: volume.info.compression,
        key: secret.as_ref().map(|secret| Arc::new(VolumeKey::new(secret, id))),
    };
    access.codec = codec_of(&volume.id);
    let mut parents = Vec::new();
    let mut child = None;
    for parent in volume.info.parents.iter().rev() {
        let origin = Origin {
            store: access.store.beside(&parent.name).map_err(|error| missing(parent, error))?,
            codec: codec_of(&parent.volume),
        };
        let at = access.at(&origin);
        let found = match read_super(&at) {
            Ok(found) if found.id == parent.volume => found,
            Ok(_) => return Err(missing(parent, ObjectError::NoVolume)),
            Err(error) => return Err(missing(parent, error)),
        };
        let (id, name) = match child.replace(parent) {
            Some(Parent { volume, name, .. }) => (volume, name.clone()),
            None => (&volume.id, access.store.name()?),
        };
        refuse_unpinned((&at, &found, &parent.name), (id, &name))?;
        parents.push(origin);
    }
    parents.reverse();
    access.parents = parents.into();
    Ok((access, volume))
}

/// Refuses a clone whose source has no pin for it, or one with another name (CLONE-4).
fn refuse_unpinned(
    (access, source, source_name): (&Access, &Volume, &str),
    (id, name): (&Id, &str),
) -> Result<(), ObjectError> {
    let pins = newest_root(access, source)?.root.pins;
    let mut pinned = pins.iter().filter_map(|pin| CloneName::parse(&pin.name));
    Err(ObjectError::Setup(match pinned.find(|pin| pin.id == *id) {
        Some(pin) if pin.clone == name => return Ok(()),
        Some(CloneName { clone, .. }) => format!(
            "the clone {clone:?} was moved or copied to {name:?}, and the volume {source_name:?} \
             beside it, which has a part of its data, does not know that: move it back to \
             {clone:?}, or remove the copy"
        ),
        None => format!(
            "{name:?} is a clone, and its pin in the volume {source_name:?} beside it is missing, \
             so that a part of its data may be deleted: bring back a copy of {source_name:?} that \
             has the pin"
        ),
    }))
}

/// The error of a clone that refers to a volume which is not there.
fn missing(parent: &Parent, error: ObjectError) -> ObjectError {
    match error {
        ObjectError::NoVolume | ObjectError::NoStore(_) | ObjectError::NotFound(_) => {
            ObjectError::Setup(format!(
                "this is a clone, and the volume {:?} beside it, which has a part of its data, is \
                 not there: bring it back",
                parent.name
            ))
        }
        error => error,
    }
}

/// The newest claim, and its number; `None`: nobody has claimed the volume yet. Claims are never
/// deleted, so a list that lags costs only looks. Of a volume that is a backup the first claim is
/// that behind the epoch of its first root, so it is looked for from `newest`, the newest root, on.
pub(crate) fn newest_claim(
    access: &Access,
    volume: &Volume,
    newest: &FoundRoot,
) -> Result<Option<(u64, Claim)>, ObjectError> {
    let listed = access.insist(|store| store.list(CLAIMS))?;
    let numbers = listed.iter().filter_map(|name| number_of(name));
    let before = volume.info.epoch_before();
    let least = newest.header.epoch.max(before);
    let mut epoch = numbers.max().unwrap_or(0).max(least);
    while access.exists(&claim_name(epoch + 1))? {
        epoch += 1;
    }
    if epoch == before {
        return Ok(None);
    }
    match claim_of(access, volume, epoch) {
        // The first root of a backup has an epoch that nobody claimed.
        Err(ObjectError::NotFound(_))
            if epoch == least && newest.root.state == RootState::Closed =>
        {
            Ok(None)
        }
        claim => Ok(Some((epoch, claim?))),
    }
}

/// The claim of an epoch.
pub(crate) fn claim_of(access: &Access, volume: &Volume, epoch: u64) -> Result<Claim, ObjectError> {
    let name = claim_name(epoch);
    let (front, table) = access.table(&name)?;
    front.expect(Kind::Claim, &volume.id, epoch)?;
    Claim::decode(&name, &table)
}

/// Who claimed an epoch, for people.
pub(crate) fn owner_of(
    access: &Access,
    volume: &Volume,
    epoch: u64,
) -> Result<String, ObjectError> {
    Ok(claim_of(access, volume, epoch)?.owner.to_string())
}

/// A root that was read.
#[derive(Clone, Debug)]
pub(crate) struct FoundRoot {
    pub header: Header,
    pub root: Root,
}

pub(crate) fn read_root(
    access: &Access,
    volume: &Volume,
    number: u64,
) -> Result<FoundRoot, ObjectError> {
    let name = root_name(number);
    let (front, table) = access.table(&name)?;
    let header = front.header;
    front.expect(Kind::Root, &volume.id, number)?;
    Ok(FoundRoot { header, root: Root::decode(&name, &table)? })
}

/// The newest root. The newest two are never deleted, and roots are deleted in ascending order. So
/// a root without the one before it is none: a claimant wrote it that a list had told of an old
/// root.
pub(crate) fn newest_root(access: &Access, volume: &Volume) -> Result<FoundRoot, ObjectError> {
    for _ in 0..LISTS_MAX {
        let listed = access.insist(|store| store.list(ROOTS))?;
        let mut number = listed.iter().filter_map(|name| number_of(name)).max().unwrap_or(0);
        if access.exists(&root_name(number))? {
            while access.exists(&root_name(number + 1))? {
                number += 1;
            }
            if number == 0 || access.exists(&root_name(number - 1))? {
                match read_root(access, volume, number) {
                    Err(ObjectError::NotFound(_)) => {}
                    other => return other,
                }
            }
        }
        access.executor.pause(LIST_AGAIN);
    }
    Err(ObjectError::Damaged { name: ROOTS.into(), what: "no root is there that can be used" })
}

/// The newest root, if it is one of a volume: a backup of which no part has ended is none.
pub(crate) fn newest_whole_root(
    access: &Access,
    volume: &Volume,
) -> Result<FoundRoot, ObjectError> {
    let found = newest_root(access, volume)?;
    if found.root.is_of_unfinished_backup() {
        return Err(ObjectError::UnfinishedBackup);
    }
    Ok(found)
}

/// Whether this is the newest root. No clock tells that: a machine may have been asleep since the
/// root was read. Roots are deleted in ascending order, but for those of snapshots.
pub(crate) fn is_newest_root(
    access: &Access,
    volume: &Volume,
    root: &FoundRoot,
) -> Result<bool, ObjectError> {
    let number = root.header.number;
    if access.exists(&root_name(number + 1))? {
        return Ok(false);
    }
    if root.root.pins.iter().any(|pin| pin.root == number) {
        return Ok(newest_root(access, volume)?.header.number == number);
    }
    access.exists(&root_name(number))
}

/// A log object or fence of the chain.
#[derive(Clone)]
pub(crate) struct Link {
    pub seq: u64,
    pub header: Header,
    /// What a log object says; empty for a fence.
    pub entries: Vec<Entry>,
}

/// Where the log ends, and what it holds from the root on.
#[derive(Clone)]
pub(crate) struct Chain {
    pub root: FoundRoot,
    pub links: Vec<Link>,
    /// The number of the next log object, and the id that comes before it.
    pub next: u64,
    pub last_id: Id,
    /// Who recovers the volume reads the log again, and has it from here. `None`: nobody does.
    pub read: Option<SmallObjects>,
}

impl Chain {
    pub fn new(root: FoundRoot) -> Self {
        let (next, last_id) = (root.root.first, root.root.last_id);
        Self { root, links: Vec::new(), next, last_id, read: None }
    }

    /// The same, for who recovers the volume.
    fn to_recover(root: FoundRoot) -> Self {
        Self { read: Some(SmallObjects::default()), ..Self::new(root) }
    }

    /// Goes on where an earlier chain ended, if that went past this one's end. What it has from
    /// there on must not have been deleted since. Objects that were read of the log before stay,
    /// for the file system's log goes back behind the root: a name that the map has was never
    /// deleted, so it means what it meant then.
    pub fn take_from(&mut self, earlier: &Self) {
        if self.read.is_some() && earlier.read.is_some() {
            self.read.clone_from(&earlier.read);
        }
        let end = (self.next, self.last_id);
        let begins = (earlier.root.root.first, earlier.root.root.last_id) == end;
        let at = earlier.links.iter().position(|link| (link.header.next, link.header.id) == end);
        let from = if begins { Some(0) } else { at.map(|at| at + 1) };
        if let Some(from) = from {
            self.links.extend_from_slice(&earlier.links[from..]);
            (self.next, self.last_id) = (earlier.next, earlier.last_id);
        }
    }

    /// Follows the log up to the first name that does not exist. `epoch_max`: a caller that meets a
    /// later epoch gives up.
    pub fn follow(
        &mut self,
        access: &Access,
        volume: &Volume,
        epoch_max: Option<u64>,
    ) -> Result<(), ObjectError> {
        let mut tables = LogTables::default();
        loop {
            let seq = self.next;
            let name = log_name(seq);
            let Some(begun) = tables.take(access, seq)? else { return Ok(()) };
            let Begun { front, table, whole } = begun;
            if let (Some(read), Some(whole)) = (&mut self.read, whole) {
                read.add(ObjectRef::log(seq), whole);
            }
            let header = front.header;
            if epoch_max.is_some_and(|most| header.epoch > most) {
                return Err(ObjectError::ClaimLost { epoch: header.epoch });
            }
            let entries = match header.kind {
                Kind::Fence => Vec::new(),
                _ => decode_entries(&name, &table)?,
            };
            let is_fence = header.kind == Kind::Fence;
            let kind = if is_fence { Kind::Fence } else { Kind::Log };
            front.expect(kind, &volume.id, seq)?;
            if header.next <= seq || !(is_fence || header.previous == self.last_id) {
                let what = "it does not continue the log";
                return Err(ObjectError::Damaged { name, what });
            }
            (self.next, self.last_id) = (header.next, header.id);
            self.links.push(Link { seq, header, entries });
        }
    }

    /// Creates a fence; if the name is taken, returns what is there.
    fn fence(
        &self,
        access: &Access,
        volume: &Volume,
        seq: u64,
        env: &Env,
    ) -> Result<(Header, Created), ObjectError> {
        let header = Header {
            previous: self.last_id,
            next: seq + 3 * u64::from(volume.info.window),
            ..new_header(Kind::Fence, volume.id, volume.epoch, seq, env)
        };
        Ok((header, access.create(&log_name(seq), &encode(&access.codec, &header, &[], &[]))?))
    }

    /// Follows the log to its end, and ends it: what an older owner writes from now on is not part
    /// of it.
    fn end(&mut self, access: &Access, volume: &Volume, env: &Env) -> Result<(), ObjectError> {
        let (mut far, mut gap_before) = (0, None);
        loop {
            self.follow(access, volume, Some(volume.epoch))?;
            let gap = self.next;
            // A log object this far behind a gap: a later owner has deleted what was there, while
            // this one slept.
            if gap_before.replace(gap) == Some(gap) {
                refuse_if_claimed(access, volume.epoch + 1)?;
            }
            if gap > far {
                let at = gap + 2 * u64::from(volume.info.window);
                match self.fence(access, volume, at, env)?.1 {
                    Created::Foreign(found) if found.kind == Kind::Log => {
                        if found.epoch > volume.epoch {
                            return Err(ObjectError::ClaimLost { epoch: found.epoch });
                        }
                        // The old owner has come that far since: the gap is filled.
                        continue;
                    }
                    Created::Ours | Created::Foreign(_) => far = at,
                    Created::Vanished => continue,
                }
            }
            let (fence, created) = self.fence(access, volume, gap, env)?;
            if created == Created::Ours {
                self.links.push(Link { seq: gap, header: fence, entries: Vec::new() });
                (self.next, self.last_id) = (fence.next, fence.id);
                return Ok(());
            }
        }
    }
}

/// Fronts and tables of log objects that are read before the chain comes to them.
struct LogTables {
    read: BTreeMap<u64, Begun>,
    /// So many names are asked for next. As long as all exist, twice as many each time: behind the
    /// end of the log at most [`AT_ONCE`] - 1 names are asked for.
    ahead: u64,
}

impl Default for LogTables {
    fn default() -> Self {
        Self { read: BTreeMap::new(), ahead: 1 }
    }
}

impl LogTables {
    /// What the log has at `seq`; `None`: nothing, as the store said after the object before it was
    /// found.
    fn take(&mut self, access: &Access, seq: u64) -> Result<Option<Begun>, ObjectError> {
        // A fence goes past names.
        self.read = self.read.split_off(&seq);
        if let Some(found) = self.read.remove(&seq) {
            return Ok(Some(found));
        }
        let names = seq..=seq.saturating_add(self.ahead - 1);
        let names = names.filter(|name| !self.read.contains_key(name)).collect();
        // Nobody needs yet what is asked for ahead: a store that does not answer then is not asked
        // again.
        let asked = access.ask_all(names, move |access, name| {
            let access =
                if name == seq { Cow::Borrowed(access) } else { Cow::Owned(access.once()) };
            Ok((name, access.read_table(&log_name(name))))
        });
        self.ahead = (AT_ONCE as u64).min(2 * self.ahead);
        for (name, table) in asked? {
            match table {
                Ok(table) => drop(self.read.insert(name, table)),
                Err(ObjectError::NotFound(_)) if name == seq => return Ok(None),
                Err(error) if name == seq => return Err(error),
                // It may be written meanwhile: it is asked for again in its turn.
                Err(_) => self.ahead = 1,
            }
        }
        Ok(self.read.remove(&seq))
    }
}

/// How a volume is opened by a new owner.
#[derive(Clone, Default)]
pub struct Claimant {
    /// Who it is.
    pub owner: Owner,
    /// It takes the volume from an owner that may be alive.
    pub take_over: bool,
    /// The locks of this machine, if all that open the volume here use them.
    pub locks: Option<Arc<dyn Locks>>,
    /// What opens the volume, if it is encrypted.
    pub passphrase: Option<Passphrase>,
    /// The local log that it will have, if it has one. What is in there is in the store.
    pub local: Option<Id>,
    /// Local logs of which the store has everything.
    pub uploaded: Vec<Id>,
    /// It takes the volume from an owner whose local log is not uploaded, too.
    pub force: bool,
    /// It will write a heartbeat, so that others may take the volume over when it is silent.
    pub beats: bool,
    /// It takes the volume only from the owner of this epoch, if that may be alive.
    pub only_from: Option<u64>,
    /// It opens the volume while an older owner may still answer reads, and serves nobody before
    /// [`ObjectDevice::await_alone`](crate::ObjectDevice::await_alone) has returned.
    pub serves_later: bool,
    /// It makes a backup there. Nobody else opens one of which no part has ended.
    pub backs_up: bool,
    /// Is told of a wait that the user would wonder about.
    pub tell: Option<fn(&str)>,
    /// What it has followed of the volume before, if it has.
    pub followed: Followed,
}

/// What a [`Follower`](crate::Follower) has read of a volume's log.
#[derive(Clone, Default)]
pub struct Followed(pub(crate) Option<Arc<Chain>>);

impl Claimant {
    /// Whether the owner that claimed this epoch is known to be dead.
    fn is_dead(&self, epoch: u64, claim: &Claim) -> Result<bool, ObjectError> {
        let here = !claim.owner.machine.is_empty() && claim.owner.machine == self.owner.machine;
        match &self.locks {
            Some(locks) if here => Ok(locks.holder(epoch)?.is_none()),
            _ => Ok(false),
        }
    }

    /// Holds the lock of an epoch.
    fn hold(&self, epoch: u64, alone: bool) -> Result<(), ObjectError> {
        let Some(locks) = &self.locks else { return Ok(()) };
        locks.hold(epoch, alone)?.map_or(Ok(()), |holder| Err(ObjectError::Locked(holder)))
    }

    /// Whether the owner may have acknowledged what only its machine has.
    fn would_lose(&self, claim: &Claim) -> bool {
        !self.force && claim.local.is_some_and(|log| !self.uploaded.contains(&log))
    }

    /// The error for a volume that has an owner.
    fn in_use(&self, epoch: u64, claim: &Claim, env: &Env) -> ObjectError {
        let holder = self.locks.as_ref().and_then(|locks| locks.holder(epoch).ok().flatten());
        let secs = env.clock.wall().as_secs().saturating_sub(claim.made_secs);
        let since = match secs {
            0..60 => format!("{secs} s"),
            60..3600 => format!("{} min", secs / 60),
            3600..172_800 => format!("{} h", secs / 3600),
            _ => format!("{} days", secs / 86_400),
        };
        ObjectError::InUse {
            owner: claim.owner.to_string(),
            since: format!("{since} ago"),
            pid: holder.map(|holder| holder.pid),
        }
    }
}

/// What is known before anything is changed: the newest root, the newest claim.
struct Found {
    root: FoundRoot,
    /// The next claim has the number behind this one: that of the newest claim; without one the
    /// number before the first.
    epoch: u64,
    before: Before,
}

/// Looks at the volume; an error if it has an owner that `claimant` does not take it from.
fn look(
    access: &Access,
    volume: &Volume,
    claimant: &Claimant,
    env: &Env,
) -> Result<Found, ObjectError> {
    let root = newest_root(access, volume)?;
    let Some((epoch, claim)) = newest_claim(access, volume, &root)? else {
        let epoch = root.header.epoch.max(volume.info.epoch_before());
        return Ok(Found { root, epoch, before: Before::Closed });
    };
    let closed = root.root.state == RootState::Closed && root.header.epoch == epoch;
    let before = if closed {
        Before::Closed
    } else {
        let dead = claimant.is_dead(epoch, &claim)?;
        let is_another = claimant.only_from.is_some_and(|from| from != epoch);
        if !dead && (!claimant.take_over || is_another) {
            return Err(claimant.in_use(epoch, &claim, env));
        }
        if claimant.would_lose(&claim) {
            return Err(ObjectError::NotUploaded { owner: claim.owner.to_string() });
        }
        if dead { Before::Dead { epoch } } else { Before::Unknown }
    };
    Ok(Found { root, epoch, before })
}

/// As [`look`], with the map of the root. An owner may write a new root meanwhile, and delete what
/// the old one needs: then this looks again.
fn look_and_load(
    access: &Access,
    volume: &Volume,
    claimant: &Claimant,
    env: &Env,
) -> Result<(Found, Shards), ObjectError> {
    loop {
        let found = look(access, volume, claimant, env)?;
        if found.root.root.is_of_unfinished_backup() && !claimant.backs_up {
            return Err(ObjectError::UnfinishedBackup);
        }
        let number = found.root.header.number;
        match load_shards(access, volume, &found.root.root.shards) {
            Err(ObjectError::NotFound(_))
                if newest_root(access, volume)?.header.number > number => {}
            loaded => return Ok((found, loaded?)),
        }
    }
}

/// What a new owner has, beside the volume.
pub(crate) struct Ownership {
    /// A time before the claim, from which the first term counts.
    pub looked: Duration,
    /// From when on it may serve.
    pub serves_from: Duration,
    /// Since when, or from when on, nobody else can have answered reads.
    pub alone_since: Duration,
    /// Its heartbeat, if it has one.
    pub beats: Option<Beats>,
}

/// Claims the volume, and fences its owner off. `term`: how long an owner may answer reads after it
/// last looked for a newer claim.
pub(crate) fn claim(
    access: &Access,
    mut volume: Volume,
    claimant: &Claimant,
    term: Duration,
    env: &Env,
) -> Result<((Volume, Chain, Shards), Ownership), ObjectError> {
    let looked = env.clock.monotonic_with_sleep();
    // What cannot be opened is not claimed.
    let (found, shards) = look_and_load(access, &volume, claimant, env)?;
    let Found { root: found, epoch, before } = found;
    volume.epoch = epoch + 1;
    claimant.hold(volume.epoch, true)?;
    let claim = Claim {
        owner: claimant.owner.clone(),
        made_secs: env.clock.wall().as_secs(),
        local: claimant.local,
        beats: claimant.beats,
    };
    let header = new_header(Kind::Claim, volume.id, volume.epoch, volume.epoch, env);
    let bytes = encode(&access.codec, &header, &claim.encode(), &[]);
    match access.create(&claim_name(volume.epoch), &bytes)? {
        Created::Ours => {}
        _ => return Err(ObjectError::ClaimLost { epoch: volume.epoch }),
    }
    let claimed = env.clock.monotonic_with_sleep();
    let beats = claimant.beats.then(|| Beats::start(Arc::clone(&access.store), volume.epoch));
    let beats = beats.transpose()?;
    let take_over = || {
        let mut chain = Chain::to_recover(take_over_root(access, &volume, env)?);
        if let Some(followed) = &claimant.followed.0 {
            chain.take_from(followed);
        }
        chain.end(access, &volume, env)?;
        access.store.settle();
        let wait = match before {
            Before::Closed => false,
            Before::Dead { epoch } => {
                !is_alone(access, &volume, claimant, epoch, &found, &chain)?
                    && !is_planted(Bug::SkippedTerm)
            }
            Before::Unknown => true,
        };
        let mut times = [env.clock.monotonic_with_sleep(); 2];
        if wait {
            // Who looks from the claim on finds it. Clocks of two machines run at different speeds,
            // by an eighth at most.
            times = [term + term / 8, term + term / 2].map(|time| claimed + time);
        }
        refuse_if_claimed(access, volume.epoch + 1)?;
        Ok((chain, times))
    };
    let take_over = || {
        let (chain, times) = take_over()?;
        let same = chain.root.root.shards == found.root.shards;
        let shards =
            if same { shards } else { load_shards(access, &volume, &chain.root.root.shards)? };
        Ok((chain, shards, times))
    };
    match take_over() {
        Ok((chain, shards, [alone_since, serves_from])) => {
            let owns = Ownership { looked, serves_from, alone_since, beats };
            Ok(((volume, chain, shards), owns))
        }
        Err(error) => Err(explained(access, &volume, error)),
    }
}

/// Waits until a new owner may serve.
pub(crate) fn await_alone(
    access: &Access,
    volume: &Volume,
    serves_from: Duration,
    tell: Option<fn(&str)>,
    env: &Env,
) -> Result<(), ObjectError> {
    let left = serves_from.saturating_sub(env.clock.monotonic_with_sleep());
    if left.is_zero() || is_planted(Bug::ServedInTerm) {
        return Ok(());
    }
    let secs = left.as_secs_f64();
    if let Some(tell) = tell.filter(|_| secs >= 1.0) {
        tell(&format!(
            "waits {secs:.1} s: the volume was not closed, and its last owner may still answer reads"
        ));
    }
    access.executor.pause(left);
    refuse_if_claimed(access, volume.epoch + 1)
}

/// Runs of the map, by shards.
pub(crate) type Shards = Vec<Vec<Run<Location>>>;

pub(crate) fn load_shards(
    access: &Access,
    volume: &Volume,
    shards: &[(u64, ObjectRef)],
) -> Result<Shards, ObjectError> {
    let volume = volume.clone();
    access
        .ask_all(shards.to_vec(), move |access, (shard, at)| load_shard(access, &volume, shard, at))
}

pub(crate) fn load_shard(
    access: &Access,
    volume: &Volume,
    shard: u64,
    at: ObjectRef,
) -> Result<Vec<Run<Location>>, ObjectError> {
    let name = shard_name(shard, at);
    let (front, table) = access.of(&volume.info, at).table(&name)?;
    front.expect(Kind::Shard, volume.id_of(at), at.number)?;
    decode_shard(&name, shard, &table)
}

/// What is known of the owner before.
enum Before {
    /// It has closed the volume, or there was none.
    Closed,
    /// It is dead. An owner before it may be alive, and answer reads, if this one died before it
    /// had waited for that.
    Dead { epoch: u64 },
    /// It may be alive.
    Unknown,
}

/// Whether nobody who owned the volume before can answer reads, when the newest owner is dead. One
/// that has served had waited until that held of all older ones. One that was killed before may not
/// have, so each owner from the last that has served on must be dead, too.
fn is_alone(
    access: &Access,
    volume: &Volume,
    claimant: &Claimant,
    newest: u64,
    found: &FoundRoot,
    chain: &Chain,
) -> Result<bool, ObjectError> {
    let first = first_in_doubt(access, volume, found, chain)?;
    if newest.saturating_sub(first) > LOOK_BACK_MAX {
        return Ok(false);
    }
    for epoch in first..newest {
        let is_dead = match claim_of(access, volume, epoch) {
            Err(ObjectError::NotFound(_)) => false,
            claim => claimant.is_dead(epoch, &claim?)?,
        };
        if !is_dead {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The oldest epoch whose owner may still answer reads: that of the last one that has served, or
/// the one behind it if it has closed the volume. The log objects of an owner, and each of its
/// roots but the first, are written when it serves.
fn first_in_doubt(
    access: &Access,
    volume: &Volume,
    found: &FoundRoot,
    chain: &Chain,
) -> Result<u64, ObjectError> {
    let logs = chain.links.iter().filter(|link| link.header.kind == Kind::Log);
    let logged = logs.map(|link| link.header.epoch).max().unwrap_or(0);
    let mut root = Cow::Borrowed(found);
    // The newest two roots are there. An older one may be deleted.
    for _ in 0..=LOOK_BACK_MAX {
        if root.root.state != RootState::Takeover || root.header.epoch <= logged {
            break;
        }
        match read_root(access, volume, root.header.number.saturating_sub(1)) {
            Err(ObjectError::NotFound(_)) => break,
            before => root = Cow::Owned(before?),
        }
    }
    Ok(match root.root.state {
        RootState::Closed => logged.max(root.header.epoch + 1),
        RootState::Takeover if root.header.epoch > logged => volume.info.epoch_before() + 1,
        _ => logged.max(root.header.epoch),
    })
}

fn refuse_if_claimed(access: &Access, epoch: u64) -> Result<(), ObjectError> {
    match access.exists(&claim_name(epoch))? {
        true => Err(ObjectError::ClaimLost { epoch }),
        false => Ok(()),
    }
}

/// Why the volume cannot be opened. A later owner deletes what it does not need: if there is one,
/// that is the reason for an object that is missing.
pub(crate) fn explained(access: &Access, volume: &Volume, error: ObjectError) -> ObjectError {
    match error {
        ObjectError::NotFound(_) | ObjectError::Damaged { .. } if volume.epoch > 0 => {
            refuse_if_claimed(access, volume.epoch + 1).err().unwrap_or(error)
        }
        error => error,
    }
}

/// Writes the root with which the new owner starts: the newest one again. The old owner can write
/// no root after it.
fn take_over_root(access: &Access, volume: &Volume, env: &Env) -> Result<FoundRoot, ObjectError> {
    if is_planted(Bug::NoTakeoverRoot) {
        return newest_root(access, volume);
    }
    loop {
        let newest = newest_root(access, volume)?;
        if newest.header.epoch > volume.epoch {
            return Err(ObjectError::ClaimLost { epoch: newest.header.epoch });
        }
        let number = newest.header.number + 1;
        let root = Root { state: RootState::Takeover, ..newest.root.clone() };
        let (header, bytes) =
            encode_root(&access.codec, volume, number, newest.header.id, &root, env);
        if access.create(&root_name(number), &bytes)? != Created::Ours {
            // The old owner, or another claimant, has written a root meanwhile.
            continue;
        }
        // If a list had named an old root, the collector has deleted it.
        if access.exists(&root_name(newest.header.number))? {
            return Ok(FoundRoot { header, root });
        }
    }
}

/// The volume as it is, for reading: nothing is claimed, and nothing written. `take_over`: its
/// owner may go on meanwhile.
pub(crate) fn observe(
    access: &Access,
    volume: Volume,
    claimant: &Claimant,
    env: &Env,
) -> Result<(Volume, Chain, Shards), ObjectError> {
    let (Found { root, epoch, .. }, shards) = look_and_load(access, &volume, claimant, env)?;
    if !claimant.take_over {
        claimant.hold(epoch + 1, false)?;
    }
    let mut chain = Chain::to_recover(root);
    chain.follow(access, &volume, None)?;
    Ok((volume, chain, shards))
}

/// The volume as it was when a snapshot was made. Nothing is claimed, nothing written, and the log
/// is not followed.
pub(crate) fn observe_snapshot(
    access: &Access,
    volume: Volume,
    name: &str,
) -> Result<(Volume, Chain, Shards), ObjectError> {
    loop {
        let newest = newest_whole_root(access, &volume)?;
        let Some(pin) = newest.root.pins.iter().find(|pin| pin.name == name) else {
            return Err(no_snapshot(name, &newest.root.pins));
        };
        let (mut chain, shards) = match read_pinned(access, &volume, pin.root) {
            // It may have been deleted meanwhile.
            Err(ObjectError::NotFound(_))
                if newest_root(access, &volume)?.header.number > newest.header.number =>
            {
                continue;
            }
            loaded => loaded?,
        };
        if is_planted(Bug::SnapshotFollowsLog) {
            chain.follow(access, &volume, None)?;
        }
        return Ok((volume, chain, shards));
    }
}

/// The root of a snapshot, which nothing follows, and its map.
pub(crate) fn read_pinned(
    access: &Access,
    volume: &Volume,
    number: u64,
) -> Result<(Chain, Shards), ObjectError> {
    let found = read_root(access, volume, number)?;
    let shards = load_shards(access, volume, &found.root.shards)?;
    Ok((Chain::new(found), shards))
}

/// The snapshots that the newest root has. Nothing is claimed.
pub(crate) fn list_snapshots(
    access: &Access,
    volume: &Volume,
) -> Result<Vec<Snapshot>, ObjectError> {
    Ok(for_people(&newest_whole_root(access, volume)?.root.pins))
}

#[cfg(test)]
mod tests;
