//! Clones: volumes that begin as a snapshot of another one, beside it in its bucket or directory.
//!
//! Nothing is copied. A clone's first root names the shards of the snapshot's root, and these name
//! the objects of the source. The name of an object tells which volume it is of: the clone's epochs
//! and the numbers of its log go on where those of the snapshot ended. `super` says where that was,
//! and which volume has the older names.
//!
//! * CLONE-1: the source has a pin of the snapshot's root for each clone. It is in the store before
//!   the clone's `super` is.
//! * CLONE-2: the clone's first root is created before the pin, and `super` last. Without both
//!   there is no volume. So if neither is found, nobody can end the making of this clone.
//! * CLONE-3: the pin is deleted only then, by the owner of the source, which looks for the root
//!   first: a clone's own collector deletes that, when there is a `super`.
//! * CLONE-4: the pin names where the clone is, and the owner of the source looks there. So a clone
//!   that is elsewhere, or has no pin, is not opened.

use crate::access::{Access, Created, Origin, Patience};
use crate::codec::{Codec, VolumeKey};
use crate::device::ObjectDevice;
use crate::error::ObjectError;
use crate::executor::Executor;
use crate::format::{
    Kind, PARENTS_MAX, Parent, Pin, Root, RootState, SUPER, Super, WrappedKey, claim_name,
    encode_super, key_name, new_header, random_id, root_name,
};
use crate::keys::{self, Passphrase};
use crate::pins::{CloneName, NAME_MAX, no_snapshot};
use crate::store::Store;
use crate::volume::{Volume, encode_root, identify, newest_root, read_root};
use ferry_env::Env;
use ferry_env::planted::{Bug, is_planted};
use std::sync::Arc;
use std::time::Duration;

/// A clone that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cloned {
    /// When its snapshot was made, in seconds since the Unix epoch.
    pub made_secs: u64,
    /// The name of its pin in the source.
    pub pin: String,
}

/// A clone that is to be made.
struct Making {
    source: (Access, Volume),
    /// The source's snapshot and its root.
    snapshot: (Pin, Root),
    clone: Access,
    volume: Volume,
    /// The name of the pin.
    name: String,
}

impl ObjectDevice {
    /// Makes a volume that is called `clone` beside the one in `store`, and is now what a snapshot
    /// of that one has. `pin` has the owner of the source make the snapshot of the name that it is
    /// given. Nothing is claimed.
    pub fn make_clone<E: From<ObjectError>>(
        (store, executor): (Arc<dyn Store>, Arc<dyn Executor>),
        (snapshot, clone): (&str, &str),
        passphrase: Option<&Passphrase>,
        patience: Duration,
        env: &Env,
        pin: impl FnOnce(&str) -> Result<(), E>,
    ) -> Result<Cloned, E> {
        let access = Access::new(store, executor, Patience::Opening(patience), env);
        let making = Making::begin(access, (snapshot, clone), passphrase, env)?;
        let name = &making.name;
        if is_planted(Bug::PinnedBehindSuper) {
            making.create_super(env)?;
            pin(name)?;
        } else {
            let pinned = pin(name).and_then(|()| Ok(making.find_pin()?));
            pinned.inspect_err(|_| making.undo())?;
            making.create_super(env).map_err(|error| making.pin_left(error))?;
        }
        Ok(Cloned { made_secs: making.snapshot.0.made_secs, pin: making.name })
    }
}

impl Making {
    /// Finds the snapshot, and creates the clone's first root.
    fn begin(
        access: Access,
        (snapshot, clone): (&str, &str),
        passphrase: Option<&Passphrase>,
        env: &Env,
    ) -> Result<Self, ObjectError> {
        let (access, source) = identify(access, passphrase)?;
        let pins = newest_root(&access, &source)?.root.pins;
        let of = pins.iter().find(|pin| pin.name == snapshot);
        let of = of.ok_or_else(|| no_snapshot(snapshot, &pins))?.clone();
        let root = read_root(&access, &source, of.root)?.root;
        if source.info.parents.len() >= PARENTS_MAX {
            return Err(ObjectError::Setup(format!(
                "it is a clone of a clone {PARENTS_MAX} times: copy it instead"
            )));
        }
        let mut info = Super { made_secs: env.clock.wall().as_secs(), ..source.info.clone() };
        let (name, free) = (access.store.name()?, of.free);
        if name.len() > NAME_MAX {
            return Err(ObjectError::Setup(format!(
                "its prefix has more than {NAME_MAX} bytes: copy it instead"
            )));
        }
        info.parents.push(Parent { name, volume: source.id, free });
        let volume = Volume { id: random_id(env), info, epoch: 0 };
        let name = CloneName { snapshot, id: volume.id, clone }.to_string();
        if name.len() > NAME_MAX {
            return Err(ObjectError::Setup(format!(
                "the names of the snapshot and of the clone are too long: {} bytes together, and {} \
                 are the most",
                snapshot.len() + clone.len(),
                NAME_MAX + snapshot.len() + clone.len() - name.len()
            )));
        }
        let codec = Codec { compression: source.info.compression, key: None };
        let target = access.at(&Origin { store: access.store.beside(clone)?, codec });
        let (target, wrapped) = match passphrase.filter(|_| source.info.encrypted) {
            None => (target, None),
            Some(passphrase) => {
                let (of, to) = (source.key_of(), volume.key_of());
                let (key, wrapped) = keys::rewrap(&access, of, to, passphrase, env)?;
                (target.with_key(VolumeKey::new(&key, &volume.id)), Some(wrapped))
            }
        };
        let source = (access, source);
        let making = Self { source, snapshot: (of, root), clone: target, volume, name };
        making.create_root(wrapped.as_ref(), env)?;
        Ok(making)
    }

    /// Creates the root that the clone begins with, and the key.
    fn create_root(&self, wrapped: Option<&WrappedKey>, env: &Env) -> Result<(), ObjectError> {
        let Self { snapshot: (_, root), clone, volume, .. } = self;
        let root = Root { state: RootState::Closed, pins: Vec::new(), ..root.clone() };
        let (_, bytes) = encode_root(&clone.codec, volume, 0, [0; 16], &root, env);
        if clone.create(&root_name(0), &bytes)? != Created::Ours {
            return Err(taken());
        }
        self.create_key(wrapped, env).inspect_err(|_| self.undo())
    }

    fn create_key(&self, wrapped: Option<&WrappedKey>, env: &Env) -> Result<(), ObjectError> {
        // A volume that was made meanwhile may have deleted its first root.
        if self.clone.exists(SUPER)? {
            return Err(ObjectError::VolumeExists);
        }
        let Some(wrapped) = wrapped else { return Ok(()) };
        match keys::write(&self.clone, self.volume.key_of(), 0, wrapped, env)? {
            Created::Ours => Ok(()),
            Created::Foreign(_) | Created::Vanished => Err(taken()),
        }
    }

    /// Refuses to go on if the store lacks the pin. The snapshot may have been another one by then.
    fn find_pin(&self) -> Result<(), ObjectError> {
        let Self { source: (access, volume), snapshot: (of, _), name, .. } = self;
        let pin = Pin { name: name.clone(), ..of.clone() };
        let newest = newest_root(access, volume).map_err(|error| self.pin_left(error))?;
        match newest.root.pins.contains(&pin) {
            true => Ok(()),
            false => Err(ObjectError::Setup(format!(
                "the snapshot {} was deleted at this moment: nothing was cloned",
                of.name
            ))),
        }
    }

    fn create_super(&self, env: &Env) -> Result<(), ObjectError> {
        let header = new_header(Kind::Super, self.volume.id, 0, 0, env);
        match self.clone.create(SUPER, &encode_super(&header, &self.volume.info))? {
            Created::Ours => self.find_root(),
            Created::Foreign(_) | Created::Vanished => {
                self.undo();
                Err(taken())
            }
        }
    }

    /// Refuses a clone without its first root, unless an owner has opened it, and deleted that.
    fn find_root(&self) -> Result<(), ObjectError> {
        let first_claim = claim_name(self.volume.info.epoch_before() + 1);
        if self.has(&root_name(0))? || self.clone.exists(&first_claim)? {
            return Ok(());
        }
        Err(ObjectError::Setup(
            "an object of the clone was removed while it was made, so it is no volume: remove its \
             other objects, too"
                .into(),
        ))
    }

    /// Whether the store has an object of this name that is the clone's.
    fn has(&self, name: &str) -> Result<bool, ObjectError> {
        Ok(self.clone.header(name)?.is_some_and(|found| found.volume == self.volume.id))
    }

    fn pin_left(&self, error: ObjectError) -> ObjectError {
        ObjectError::PinLeft { error: Box::new(error), pin: self.name.clone() }
    }

    /// There will be no clone. What is left of it is no volume. What another maker created stays,
    /// and no deletion is repeated: it might delete what another creates behind the first one.
    fn undo(&self) {
        for name in [key_name(0), root_name(0)] {
            let deleted = self.has(&name).and_then(|has| match has {
                true => self.clone.store.delete(&name),
                false => Ok(()),
            });
            if let Err(error) = deleted {
                tracing::warn!(%error, "the object {name} of a clone that was not made is left");
            }
        }
    }
}

fn taken() -> ObjectError {
    ObjectError::Setup("another volume is made in the place of the clone at this moment".into())
}
