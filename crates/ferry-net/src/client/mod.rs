//! The client: a file system whose files are a server's.
//!
//! `link` is the way there, `waiting` a request of the kernel on that way, `tables` what a new
//! session has to be told if the old one is gone, `requests` and `locking` the
//! [`ferry_fs::Filesystem`] implementation. The kernel is told to keep neither names nor attributes
//! nor contents; `cache` keeps names and attributes as long as the server gives leases for them, so
//! that what one client has done the others see at once; `contents` what is in small files. `redo`
//! makes again what a server that crashed has lost. Under write leases changes are decided here
//! (`deciding`, `model`, `purse`), answered, and sent to the server afterwards. `walking` asks
//! ahead of those who go through a tree.

mod cache;
mod contents;
mod deciding;
mod kernel;
mod link;
mod locking;
mod losses;
mod model;
mod moving;
mod purse;
mod redo;
mod requests;
mod server_clock;
mod space;
mod tables;
mod waiting;
mod walking;

use crate::rt::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::rt::Mutex;
use crate::rt::runtime::Runtime;
use ferry_env::Env;
use ferry_fs::{Answer, Cx, Errno, FileLock, Ino, Stop};

pub use link::{Connecting, Connector};

use crate::codec::List;
use crate::error::NetError;
use crate::message::{BATCH_MAX, Claim, Forgotten, Known, Op, Outcome, ToClient, Who};
use cache::{Cache, Moment};
use kernel::Kernel;
use link::{Before, Link, Pending, Restore, Restored, Waiter};
use losses::Loss;
use redo::{Plan, Step};
use tables::{Node, Tables};
use waiting::{Finish, Keep, Nobody, Unsettled, Waiting};
use walking::Walking;

/// So many forgotten inodes are told at once, or what there is at each ping.
const FORGET_BATCH: usize = 64;
/// What an unmount waits for the server to hear of it.
const FAREWELL_TIME_MAX: Duration = Duration::from_secs(1);

/// How to mount.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The server, for messages.
    pub server: String,
    /// What to mount: a path on the server's volume.
    pub path: Vec<u8>,
    /// What the server's messages call this client.
    pub name: Vec<u8>,
    /// Operations wait so long for a server that is gone, then they fail with `ETIMEDOUT`.
    pub timeout: Duration,
    /// Changes are answered before the server has made them, where its leases allow that.
    pub asynchronous: bool,
    /// Reads move no access time.
    pub noatime: bool,
}

/// The file system.
pub struct RemoteFs {
    this: Weak<RemoteFs>,
    link: Arc<Link>,
    cache: Arc<Cache>,
    tables: Mutex<Tables>,
    forgotten: Mutex<Vec<Forgotten>>,
    /// Space is lacking: until then what the kernel forgets is told at once.
    hurries: Mutex<Option<Moment>>,
    walking: Mutex<Walking>,
    kernel: Arc<Kernel>,
    asynchronous: bool,
    /// What all files are opened with, besides what programs say.
    open_flags: i32,
    /// An unmount waits so long until what was promised is made.
    timeout: Duration,
    /// Changes that programs were told of and that are lost, and inodes that were not as was
    /// decided here.
    lost: AtomicU64,
    /// Those that the log does not name yet.
    losses: Mutex<Vec<Loss>>,
    differences: AtomicU64,
    runtime: Mutex<Option<Runtime>>,
    /// Some file's pages were read by the kernel.
    some_mapped: AtomicBool,
    abandoned: AtomicBool,
}

impl RemoteFs {
    /// Connects to a server. An error says why there is nothing to mount.
    pub fn connect(
        connector: Arc<dyn Connector>,
        options: ClientOptions,
        env: &Env,
    ) -> Result<Arc<Self>, NetError> {
        let runtime = crate::rt::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("ferry-client")
            .enable_all()
            .build()
            .map_err(NetError::Start)?;
        let server = options.server;
        let names = (options.path, options.name);
        let cache = Arc::new(Cache::new(Arc::clone(&env.clock)));
        let clock = Arc::clone(&env.clock);
        let kernel = Arc::new(Kernel::default());
        let kept = (Arc::clone(&cache), Arc::clone(&kernel));
        let link = Link::new(connector, clock, names, options.timeout, kept);
        let first = runtime
            .block_on(link.greet())
            .map_err(|error| NetError::Reach { server: server.clone(), error })?;
        let mut asynchronous = options.asynchronous;
        match &first.1 {
            ToClient::Refused { reason } => {
                let reason = String::from_utf8_lossy(reason).into_owned();
                return Err(NetError::Refused { server, reason });
            }
            // The mount's flags depend on it, before the link runs.
            ToClient::Welcome { read_only, promises, .. } => {
                link.set_read_only(*read_only);
                asynchronous &= *promises;
            }
            _ => {}
        }
        let fs = Arc::new_cyclic(|this| Self {
            this: this.clone(),
            link: Arc::clone(&link),
            cache,
            tables: Mutex::default(),
            forgotten: Mutex::default(),
            hurries: Mutex::default(),
            walking: Mutex::default(),
            kernel,
            asynchronous,
            open_flags: if options.noatime { libc::O_NOATIME } else { 0 },
            timeout: options.timeout,
            lost: AtomicU64::new(0),
            losses: Mutex::default(),
            differences: AtomicU64::new(0),
            some_mapped: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            runtime: Mutex::default(),
        });
        let restore = Arc::new(Restorer(Arc::downgrade(&fs)));
        runtime.spawn(async move { link.run(first, restore).await });
        *fs.runtime.lock() = Some(runtime);
        fs.ask_for_supplies();
        Ok(fs)
    }

    /// Ends the session, as an unmount does. Operations that wait, and later ones, fail.
    pub fn close(&self) {
        let runtime = self.runtime.lock().take();
        if let Some(runtime) = &runtime {
            let patient = !self.abandoned.load(Ordering::SeqCst);
            runtime.block_on(async {
                let _late =
                    crate::rt::time::timeout(self.timeout, self.link.drained(patient)).await;
                if patient {
                    // Who does not say goodbye keeps others waiting.
                    let _late =
                        crate::rt::time::timeout(FAREWELL_TIME_MAX, self.link.reached()).await;
                }
            });
        }
        self.link.close();
        if let Some(runtime) = runtime {
            runtime.block_on(async {
                let told = self.link.told();
                let _late = crate::rt::time::timeout(FAREWELL_TIME_MAX, told).await;
            });
            runtime.shutdown_background();
        }
    }

    /// The mount is to end at once: [`RemoteFs::close`] does not wait for a server that is away.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
    }

    /// Whether the server lets this client change anything.
    pub fn is_read_only(&self) -> bool {
        self.link.is_read_only()
    }

    /// What this side counts (`connection`, `kept` and `fuse` of `ferry stats`), without asking the
    /// server.
    pub fn figures(&self) -> serde_json::Value {
        let mut connection = self.link.json();
        connection["lost_changes"] = self.lost.load(Ordering::Relaxed).into();
        connection["differences"] = self.differences.load(Ordering::Relaxed).into();
        serde_json::Value::from_iter([
            ("connection", connection),
            ("kept", self.cache.json()),
            ("fuse", self.kernel.stats()),
        ])
    }

    /// Of the connection, without asking the server.
    #[cfg(test)]
    pub(crate) fn connection(&self) -> serde_json::Value {
        self.link.json()
    }

    /// Bytes and inodes that it may promise.
    #[cfg(test)]
    pub(crate) fn credit(&self) -> (u64, u64) {
        match self.cache.lock().purse.kept() {
            Some(Op::Spare { bytes, inodes }) => (bytes, inodes),
            _ => (0, 0),
        }
    }

    /// Sends an operation; its answer comes later.
    fn send<T>(&self, cx: &Cx<'_>, op: Op, finish: Finish) -> Answer<T> {
        let parked = self.park(cx, op, (finish, None), None);
        self.send_parked(parked);
        Err(Stop::Parked)
    }

    /// The same; what the answer says is kept if it may be.
    fn send_and_keep<T>(&self, cx: &Cx<'_>, op: Op, finish: Finish, keep: Keep) -> Answer<T> {
        let parked = self.park(cx, op, (finish, Some(keep)), None);
        self.send_parked(parked);
        Err(Stop::Parked)
    }

    /// Parks a request that is not sent yet.
    fn park(
        &self,
        cx: &Cx<'_>,
        op: Op,
        finish: (Finish, Option<Keep>),
        unsettled: Option<Box<dyn Unsettled>>,
    ) -> Parked {
        let waiting = Waiting::new(self.this.clone(), finish, unsettled);
        // It keeps the request: an answer that has just come must still be undone.
        let interrupted = Arc::clone(&waiting);
        let interrupt = Box::new(move || interrupted.interrupt());
        waiting.set_complete(cx.park.park(Some(interrupt)));
        let files = self.files_of(&op);
        let waiter = Arc::clone(&waiting) as Arc<dyn Waiter>;
        let pending = Pending { files, ..Pending::new(who(cx), op, waiter) };
        Parked { pending, waiting }
    }

    fn send_parked(&self, Parked { pending, waiting }: Parked) {
        let ordered = pending.op.is_ordered();
        // Where there is hardly any space, the server needs what was removed, and hears of it
        // before the change.
        if ordered && self.cache.lock().purse.is_refused(self.cache.now()) {
            self.hurry();
        }
        let key = if ordered { self.link.change(pending) } else { self.link.request(pending) };
        if let Some(key) = key {
            waiting.set_key(key);
        }
    }

    /// Sends a change that nobody waits for.
    fn tell(&self, op: Op) {
        self.link.change(Pending::new(Who::default(), op, Arc::new(Nobody)));
    }

    /// A lock that is held is the server's again as it was; if not, it is lost.
    fn reclaim(&self, ino: Ino, lock: FileLock) {
        let waiter = Arc::new(Regained { fs: self.this.clone(), ino });
        self.link.change(Pending::new(Who::default(), Op::Reclaim { ino, lock }, waiter));
    }

    /// The answer to a promised change has named an inode, or never will.
    fn confirm(&self, ino: Ino, known: Option<&Known>) {
        let node = self.tables.lock().confirm(ino, known);
        self.gone_from_tables(ino, node);
    }

    /// The kernel does not know an inode any more.
    fn gone_from_tables(&self, ino: Ino, node: Option<Node>) {
        let Some(Node { stamp, ticket, .. }) = node else { return };
        let known = ticket.is_none_or(|ticket| self.link.remember(Claim { ino, ticket }));
        if known {
            self.forgotten(Forgotten { ino, stamp });
        }
    }

    /// An inode was made again.
    fn known_again(&self, ino: Ino, known: &Known) {
        if !self.tables.lock().known_again(ino, known) {
            let _known = self.link.remember(Claim { ino, ticket: known.ticket });
        }
    }

    /// Changes of these are lost.
    fn cannot_redo(&self, touched: &[Ino], losses: Vec<Loss>) {
        self.lost.fetch_add(losses.len() as u64, Ordering::Relaxed);
        self.losses.lock().extend(losses);
        self.tables.lock().damage(touched.iter().copied());
    }

    /// Names in the log what is lost.
    fn tell_losses(&self) {
        let losses = std::mem::take(&mut *self.losses.lock());
        losses::tell(&losses, &self.tables.lock());
    }

    /// The kernel, or whoever would have told it, takes lookups back.
    fn forget_known(&self, ino: Ino, count: u64) {
        let node = {
            let mut cache = self.cache.lock();
            let node = self.tables.lock().forget(ino, count);
            if node.is_some() {
                cache.unsee(ino);
            }
            node
        };
        self.gone_from_tables(ino, node);
    }

    /// The server is told of it, with others.
    fn forgotten(&self, one: Forgotten) {
        let full = {
            let mut forgotten = self.forgotten.lock();
            forgotten.push(one);
            forgotten.len() >= FORGET_BATCH || self.hurries()
        };
        if full {
            self.tell_forgotten();
        }
    }

    /// It may be the last thing that keeps a removed file there.
    fn tell_forgotten(&self) {
        let batch = std::mem::take(&mut *self.forgotten.lock());
        if batch.is_empty() {
            return;
        }
        self.link.give_back(&batch.iter().map(|one| one.ino).collect::<Vec<_>>());
        self.tell(Op::Forget { inodes: List(batch) });
    }

    fn release_handle(&self, fh: u64) {
        let ended = self.tables.lock().remove_handle(fh);
        if let Some((ino, locks)) = ended {
            locks.into_iter().for_each(|lock| self.tell(Op::Unlock { ino, lock }));
        }
        self.tell(Op::Release { fh });
    }
}

impl Drop for RemoteFs {
    fn drop(&mut self) {
        self.link.close();
        if let Some(runtime) = self.runtime.lock().take() {
            // The server hears of it, else it waits for leases that nobody has. A thread of the
            // runtime itself must not wait.
            if crate::rt::runtime::Handle::try_current().is_err() {
                runtime.block_on(async {
                    let _late = crate::rt::time::timeout(FAREWELL_TIME_MAX, self.link.told()).await;
                });
            }
            runtime.shutdown_background();
        }
    }
}

/// A request that is parked and not sent.
struct Parked {
    pending: Pending,
    waiting: Arc<Waiting>,
}

fn who(cx: &Cx<'_>) -> Who {
    Who { uid: cx.uid, gid: cx.gid, pid: cx.pid, umask: cx.umask }
}

struct Restorer(Weak<RemoteFs>);

impl Restore for Restorer {
    fn restore(&self, before: Before) -> Restored {
        let Some(fs) = self.0.upgrade() else { return Restored::default() };
        fs.forgotten.lock().clear();
        let mut tables = fs.tables.lock();
        for ino in tables.ahead(None) {
            let _of_the_old_session = tables.forget(ino, 1);
        }
        let mut plan = match before {
            Before::Clean => None,
            Before::Ended => {
                for ino in tables.lose_locked() {
                    tracing::error!(
                        inode = ino,
                        "the lock on an open file is lost, for the server was out of reach too long: using the file fails now"
                    );
                }
                None
            }
            Before::Crashed(redo) => Some(Plan::new(redo, &mut tables)),
        };
        let pending = |op, waiter| Pending::new(Who::default(), op, waiter);
        let mut all = Vec::new();
        if let Some(plan) = &mut plan {
            fs.lost.fetch_add(plan.losses.len() as u64, Ordering::Relaxed);
            tables.damage(plan.lost.iter().copied());
            let mut losses = fs.losses.lock();
            losses.append(&mut plan.losses);
            // Otherwise more may come until everything is made again.
            if !plan.at_all {
                losses::tell(&std::mem::take(&mut *losses), &tables);
            }
            for ino in std::mem::take(&mut plan.unnamed) {
                let _gone = tables.confirm(ino, None);
            }
            for (numbers, made) in std::mem::take(&mut plan.numbers) {
                let waiter = Arc::new(Numbered { fs: self.0.clone(), made: made.clone() });
                all.push(pending(
                    Op::Numbered { numbers, made: List(made) },
                    waiter as Arc<dyn Waiter>,
                ));
            }
        }
        let mut needed: HashSet<Ino> = tables.handles.values().map(|handle| handle.ino).collect();
        needed.extend(tables.locks.keys());
        needed.extend(plan.iter().flat_map(|plan| plan.needed.iter()));
        let (mut claims, mut rest) = (Vec::new(), Vec::with_capacity(tables.nodes.len()));
        for (ino, node) in &mut tables.nodes {
            node.stamp = 0;
            let list = if needed.contains(ino) { &mut claims } else { &mut rest };
            list.extend(node.ticket.map(|ticket| Claim { ino: *ino, ticket }));
        }
        claims.extend(plan.iter().flat_map(|plan| plan.claims.iter().copied()));
        claims.sort_unstable_by_key(|claim| claim.ino);
        for claims in claims.chunks(BATCH_MAX) {
            all.push(pending(
                Op::Claim { inodes: List(claims.to_vec()) },
                Arc::new(Nobody) as Arc<dyn Waiter>,
            ));
        }
        for step in plan.iter_mut().flat_map(|plan| std::mem::take(&mut plan.steps)) {
            all.push(match step {
                Step::Open { ino, fh } => {
                    let op = Op::Open { ino, fh, flags: libc::O_RDWR, kill_suidgid: false };
                    pending(op, Arc::new(Nobody))
                }
                Step::Change(change) => redo::pending(&self.0, *change),
            });
        }
        for (fh, handle) in tables.handles.iter().filter(|(_, handle)| !handle.lost) {
            // It exists, it was checked who may open it, and nothing is to be cut off.
            let flags = handle.flags & !(libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC);
            let op = Op::Open { ino: handle.ino, fh: *fh, flags, kill_suidgid: false };
            all.push(pending(op, Arc::new(Regained { fs: self.0.clone(), ino: handle.ino })));
        }
        for (ino, lock) in tables.all_locks() {
            let op = Op::Reclaim { ino, lock };
            all.push(pending(op, Arc::new(Regained { fs: self.0.clone(), ino })));
        }
        if let Some(plan) = plan {
            let closes = plan.opened.iter().map(|fh| Op::Release { fh: *fh });
            let last = closes.chain(redo::forget(&plan.forgotten));
            all.extend(last.map(|op| pending(op, Arc::new(Nobody) as Arc<dyn Waiter>)));
            if plan.at_all {
                all.push(pending(Op::Redone {}, Arc::new(redo::Done(self.0.clone()))));
            }
        }
        Restored { first: all, rest }
    }

    fn fatal(&self, op: &Op) {
        let Some(fs) = self.0.upgrade() else { return };
        let mut tables = fs.tables.lock();
        match op {
            // Using it says that it is not known.
            Op::Claim { inodes } => {
                for claim in &inodes.0 {
                    tables.nodes.entry(claim.ino).and_modify(|node| node.ticket = None);
                }
            }
            Op::Open { ino, .. } | Op::Reclaim { ino, .. } => drop(tables.lose(*ino)),
            _ => {}
        }
    }

    fn claimed(&self, inos: &[Claim], stamp: u64) {
        let Some(fs) = self.0.upgrade() else { return };
        let gone: Vec<Ino> = {
            let mut tables = fs.tables.lock();
            let known = |claim: &&Claim| {
                let node = tables.nodes.get_mut(&claim.ino);
                node.map(|node| node.stamp = node.stamp.max(stamp)).is_none()
            };
            inos.iter().filter(known).map(|claim| claim.ino).collect()
        };
        // The kernel has forgotten them meanwhile.
        gone.into_iter().for_each(|ino| fs.forgotten(Forgotten { ino, stamp }));
    }

    fn damaged(&self, changes: &[&Pending]) {
        if let Some(fs) = self.0.upgrade() {
            let mut tables = fs.tables.lock();
            changes.iter().for_each(|change| tables.lost(&change.op, &change.touched));
        }
    }

    fn has_locks(&self) -> bool {
        self.0.upgrade().is_some_and(|fs| !fs.tables.lock().locks.is_empty())
    }

    fn lost(&self, changes: Vec<Pending>) {
        let Some(fs) = self.0.upgrade() else { return };
        let file = |change: &Pending| change.files.first().map(|(_, ino)| *ino);
        let loss = |change: &Pending| {
            Loss::of(&change.op, file(change).or(change.touched.first().copied()))
        };
        fs.cannot_redo(&[], changes.iter().map(loss).collect());
        fs.tell_losses();
        for change in changes {
            if let Some(ino) = change.promised.map(|promised| promised.ino).filter(|ino| *ino != 0)
            {
                fs.confirm(ino, None);
            } else if let Op::Link { ino, .. } = change.op {
                fs.confirm(ino, None);
            }
        }
    }

    fn refuses(&self, op: &Op, files: &[(u64, Ino)]) -> bool {
        self.0.upgrade().is_some_and(|fs| fs.tables.lock().refuses(op, files))
    }

    fn given_up(&self, inos: Option<&[Ino]>) {
        let Some(fs) = self.0.upgrade() else { return };
        let ahead = fs.tables.lock().ahead(inos);
        fs.forget_ahead(&ahead);
    }

    fn busy(&self, change: Pending) {
        if let Some(fs) = self.0.upgrade() {
            fs.borrow(change);
        }
    }

    fn lacks_space(&self, change: Pending) {
        match self.0.upgrade() {
            Some(fs) => fs.find_space(change),
            None => change.waiter.fail(Errno(libc::ENOSPC)),
        }
    }

    fn hurry(&self) {
        if let Some(fs) = self.0.upgrade() {
            fs.hurry();
        }
    }

    fn differs(&self, ino: Ino) {
        let Some(fs) = self.0.upgrade() else { return };
        fs.differences.fetch_add(1, Ordering::Relaxed);
        tracing::error!(
            inode = ino,
            "the server has made a change otherwise than it was decided here"
        );
        fs.link.give_back(&[ino]);
    }

    fn tick(&self) {
        if let Some(fs) = self.0.upgrade() {
            fs.tell_forgotten();
        }
    }
}

/// Inodes that were made without an answer are known in a new session.
struct Numbered {
    fs: Weak<RemoteFs>,
    made: Vec<Ino>,
}

impl Waiter for Numbered {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        let (Some(fs), Outcome::Claimed { claims, stamp }) = (self.fs.upgrade(), outcome) else {
            return;
        };
        for ino in &self.made {
            let claim = claims.0.iter().find(|claim| claim.ino == *ino);
            let node = fs.tables.lock().found(*ino, claim.map(|claim| (claim.ticket, stamp)));
            fs.gone_from_tables(*ino, node);
        }
    }

    fn fail(&self, _errno: Errno) {}
}

/// An open file or a lock is there again in a new session, or is lost.
struct Regained {
    fs: Weak<RemoteFs>,
    ino: Ino,
}

impl Waiter for Regained {
    fn answer(&self, outcome: Outcome, _leased: u8) {
        if let (Some(fs), Outcome::Failed { errno }) = (self.fs.upgrade(), outcome) {
            tracing::error!(
                inode = self.ino,
                errno,
                "an open file or a lock on it is lost: using the file fails now"
            );
            let (ino, locks) = (self.ino, fs.tables.lock().lose(self.ino));
            locks.into_iter().for_each(|lock| fs.tell(Op::Unlock { ino, lock }));
            fs.link.fail_unsent(ino);
        }
    }

    fn fail(&self, _errno: Errno) {}
}
