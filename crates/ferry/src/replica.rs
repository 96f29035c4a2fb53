//! `ferry mount -o replica`: a mount that follows a volume in a store, beside its owner.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ferry_env::Env;
use ferry_fs::{
    CacheMode, CarriedReplica, Filesystem, Known, Replica, ReplicaOptions, Version, Versions,
};
use ferry_object::Follower;

use crate::asked::Asked;
use crate::cache_size::{GivesWay, default_bytes};
use crate::cli::MountArgs;
use crate::control::STATS;
use crate::daemon::{self, Served, Service, Settle};
use crate::error::CliError;
use crate::hold::{self, Held, Holder, Open};
use crate::location::Location;
use crate::open::{explain, follow_in_store, on_disk};
use crate::options::MountOptions;
use crate::passphrase;
use crate::spaced::{BEGIN, refusal};

/// What the table of mounts shows behind the volume. Without it the mount would be taken for that
/// of the owner, where both are on one machine.
const SUFFIX: &str = "#replica";
/// Why a replica answers no `ferry space`.
const COUNTS_NOT: &str = "a replica does not add up space: ask where the volume itself is mounted";

/// The volume that the source of a mount names: of a replica the one that it follows.
pub fn followed(source: &str) -> &str {
    source.strip_suffix(SUFFIX).unwrap_or(source)
}

/// Refuses what cannot be followed, and options that only an owner may use.
pub fn check(args: &MountArgs, options: &MountOptions) -> Result<(), CliError> {
    let volume = &args.volume;
    let refused = |why: &str| Err(CliError::Usage(why.into()));
    match volume {
        Location::Store(_) => {}
        Location::Snapshot(..) => {
            return Err(CliError::Usage(format!("{volume}: replica: a snapshot never changes")));
        }
        Location::Path(_) | Location::Server(_) => {
            return Err(CliError::Usage(format!(
                "{volume}: replica is for volumes in a store (s3://, dir://)"
            )));
        }
    }
    if options.snapshot.is_some() {
        return refused("replica, snapshot: a snapshot never changes: give one of them");
    }
    if args.create {
        return refused("--create: a replica follows a volume that is there");
    }
    if args.take_over {
        return refused("--take-over: a replica leaves the volume to its owner");
    }
    if options.local == Some(true) || options.local_log.is_some() {
        return refused("durability=local: a replica makes nothing durable");
    }
    if options.cache == CacheMode::Writeback {
        return refused("cache=writeback: a replica is only read");
    }
    Ok(())
}

/// Finds versions in a store.
struct InStore(Follower);

impl Versions for InStore {
    fn look(&mut self, anew: bool) -> Result<Option<Version>, Box<dyn Error>> {
        Ok(self.0.look(anew)?.map(version))
    }
}

fn version(found: ferry_object::Version) -> Version {
    let ferry_object::Version { device, epoch, root, log, new_timeline, .. } = found;
    let read = Arc::clone(&device);
    let is_readable = Box::new(move || read.has_read_all());
    Version { dev: device, new_timeline, epoch, root, log, is_readable }
}

/// What the process before has left.
fn before(open: &Open) -> Result<CarriedReplica, CliError> {
    let carried = match open {
        Open::Carried(bytes, _) => CarriedReplica::decode(bytes),
        Open::Known(file) => CarriedReplica::left(&hold::left_words(file)?).inspect(|left| {
            tracing::warn!(open = left.open(), "a process was killed: this one goes on");
        }),
    };
    carried.ok_or_else(hold::other_form)
}

/// Serves the mount until it has ended, looking for a newer state each `interval`.
pub fn serve(
    source: &Path,
    interval: Duration,
    mountpoint: &Path,
    held: Option<Held>,
    args: &MountArgs,
    options: &MountOptions,
    log: Option<&Path>,
) -> Result<(), CliError> {
    daemon::prepare(args.daemon);
    let env = Env::real();
    let volume = &args.volume;
    let failed = |error: &dyn std::fmt::Display| CliError::Failed(format!("{volume}: {error}"));
    let before = held.as_ref().map(|held| before(&held.open)).transpose()?;
    let cache = on_disk(volume, options.cache_disk(), None, None)?.cache;
    let followed = follow_in_store(volume, cache.as_ref(), &env);
    let mut follower = followed.map_err(|error| explain(volume, &error))?;
    if let Some(before) = &before {
        follower.goes_on_from(before.root());
    }
    let known = Holder::get().and_then(|_| hold::new_known());
    if let (Some(holder), Some(_)) = (Holder::get(), &known) {
        holder.keep_store(None, follower.key().as_ref().map(|key| &key[..]))?;
    }
    let begun = env.clock.monotonic_with_sleep();
    let first = follower.look(true).map_err(|error| explain(volume, &error.into()))?;
    let first = version(first.expect("a look anew finds what there is"));
    let cache_bytes = options.cache_bytes.and_then(|bytes| usize::try_from(bytes).ok());
    let replica_options = ReplicaOptions {
        interval,
        cache: options.cache,
        cache_bytes: cache_bytes.unwrap_or_else(default_bytes),
        owner: rustix::process::geteuid().as_raw(),
        known: known.clone(),
    };
    let cache_size = replica_options.cache_bytes;
    let versions = Box::new(InStore(follower));
    let found = (&first, begun);
    let replica = Replica::open(found, before.as_ref(), versions, replica_options, env.clone());
    let replica = replica.map_err(|error| failed(&error))?;
    drop(first);
    let gives_way = GivesWay::start(&replica, Replica::set_memory_limit, cache_size, &env);
    let asked = Asked::new();
    let (answering, settled) = (Arc::downgrade(&replica), Arc::downgrade(&replica));
    let settle: Settle = Arc::new(move |leave| {
        passphrase::is_there().map_err(|error| error.to_string())?;
        settled.upgrade().ok_or(daemon::ENDS)?.without_turns(leave)
    });
    let served = daemon::serve(
        Arc::clone(&replica) as Arc<dyn Filesystem>,
        &mut Service {
            before: held.map(|held| held.connection),
            known: known.as_deref().map(Known::file).transpose().map_err(|e| failed(&e))?,
            settle: Holder::get().map(|_| settle),
            mountpoint,
            options: options.for_kernel(format!("{}{SUFFIX}", source.display()), false),
            listed_options: Some(options.own_words()),
            daemon: args.daemon,
            log,
            stop_timeout: args.stop_timeout,
            asked: &asked,
            metrics: options.metrics.as_ref().map(|address| (address, STATS)),
        },
        Arc::new(move |question| match question {
            STATS => Some(answering.upgrade()?.stats()),
            other => other.starts_with(BEGIN).then(|| refusal(COUNTS_NOT)),
        }),
    );
    drop(gives_way);
    // Requests under way may wait for the store.
    replica.end();
    let served = served.and_then(|served| leave(&replica, mountpoint, served));
    asked.ended(&served);
    replica.close();
    served
}

/// Leaves the mount to another process, if it is to go on there.
fn leave(replica: &Replica, mountpoint: &Path, served: Served) -> Result<(), CliError> {
    let (Served::HandedOver(connection, program), Some(holder)) = (served, Holder::get()) else {
        return Ok(());
    };
    let carried = replica.carry();
    holder.leave(&connection, &carried.encode(), mountpoint, &program)?;
    tracing::info!(program = %program.display(), open = carried.open(), "another process goes on");
    Ok(())
}
