//! Mounting: a connection to the server and the runtime that serves it; and unmounting.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::rt::Mutex;
use ferry_env::Env;
use ferry_fs::Errno;

use super::cache::Cache;
use super::carried::Carried;
use super::kernel::Kernel;
use super::left::Left;
use super::link::Link;
use super::link::connection::Greeted;
use super::notes::Notes;
use super::remote::RemoteFs;
use super::restorer::Restorer;
use super::tables::Tables;
use crate::error::NetError;
use crate::message::ToClient;
use crate::transport::Connector;

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
    /// How long operations wait for a server that cannot be reached, then they fail with
    /// `ETIMEDOUT`.
    pub timeout: Duration,
    /// Changes are answered before the server has made them, where its leases allow that.
    pub asynchronous: bool,
    /// Reads move no access time.
    pub noatime: bool,
    /// Where it is noted what another process needs to go on if this one is killed. `None`: the
    /// mount ends with it.
    pub notes: Option<Arc<Notes>>,
}

impl RemoteFs {
    /// Connects to a server. An error says why there is nothing to mount.
    pub fn connect(
        connector: Arc<dyn Connector>,
        options: ClientOptions,
        env: &Env,
    ) -> Result<Arc<Self>, NetError> {
        let mut tables = Tables::default();
        options.notes.iter().for_each(|notes| tables.note_in(notes));
        let fs = Self::new(connector, &options, env, tables)?;
        match fs.greet_first(options.server) {
            Ok(first) => fs.run(Some(first)),
            Err(error) => {
                // The link does not live, and has nobody to say goodbye to.
                if let Some(runtime) = fs.runtime.lock().take() {
                    runtime.shutdown_background();
                }
                return Err(error);
            }
        }
        let _granted = fs.set_asynchronous(options.asynchronous);
        Ok(fs)
    }

    /// The first connection. An error says why there is nothing to mount.
    fn greet_first(&self, server: String) -> Result<Greeted, NetError> {
        let greeted = self.runtime.lock().as_ref().map(|it| it.block_on(self.link.greet_first()));
        let first = greeted.unwrap_or_else(|| Err(std::io::ErrorKind::NotConnected.into()));
        let first = first.map_err(|error| NetError::Reach { server: server.clone(), error })?;
        match &first.answer {
            ToClient::Refused { reason } => {
                let reason = String::from_utf8_lossy(reason).into_owned();
                return Err(NetError::Refused { server, reason });
            }
            // The mount's flags depend on it, before the link runs.
            ToClient::Welcome { read_only, early_acks, .. } => {
                self.link.set_read_only(*read_only);
                self.link.set_early_acks(*early_acks && first.protocol.has_early_acks());
            }
            _ => {}
        }
        Ok(first)
    }

    /// Goes on with a mount that another process has left. It connects when the kernel's requests
    /// are about to come ([`ferry_fs::Filesystem::attach`]).
    pub fn go_on(
        connector: Arc<dyn Connector>,
        options: ClientOptions,
        carried: &Carried,
        env: &Env,
    ) -> Result<Arc<Self>, NetError> {
        let mut tables = carried.tables();
        options.notes.iter().for_each(|notes| tables.note_in(notes));
        let fs = Self::new(connector, &options, env, tables)?;
        fs.link.resume(&carried.session, carried.to_forget.clone());
        fs.is_left.store(true, Ordering::SeqCst);
        let _granted = fs.set_asynchronous(options.asynchronous);
        Ok(fs)
    }

    /// Not connected yet.
    pub(super) fn new(
        connector: Arc<dyn Connector>,
        options: &ClientOptions,
        env: &Env,
        tables: Tables,
    ) -> Result<Arc<Self>, NetError> {
        let runtime = crate::rt::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("ferry-client")
            .enable_all()
            .build()
            .map_err(NetError::Start)?;
        let names = (options.path.clone(), options.name.clone());
        let cache = Arc::new(Cache::new(Arc::clone(&env.clock)));
        let clock = Arc::clone(&env.clock);
        let kernel = Arc::new(Kernel::default());
        let shared = (Arc::clone(&cache), Arc::clone(&kernel));
        let some_mapped = tables.nodes.values().any(|node| node.is_mapped);
        Ok(Arc::new_cyclic(|this| Self {
            this: this.clone(),
            link: Link::new(
                connector,
                clock,
                names,
                options.timeout,
                shared,
                options.notes.clone(),
            ),
            cache,
            tables: Mutex::new(tables),
            forgotten: Mutex::default(),
            hurries: Mutex::default(),
            walking: Mutex::default(),
            kernel,
            open_flags: if options.noatime { libc::O_NOATIME } else { 0 },
            timeout: options.timeout,
            lost: AtomicU64::new(0),
            losses: Mutex::default(),
            losses_are_known: AtomicBool::new(false),
            some_mapped: AtomicBool::new(some_mapped),
            abandoned: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
            left: Left::default(),
            runtime: Mutex::new(Some(runtime)),
        }))
    }

    /// Lets the link live, on this connection and those after it.
    fn run(&self, first: Option<Greeted>) {
        if let Some(runtime) = &*self.runtime.lock() {
            let restore = Arc::new(Restorer(self.this.clone()));
            let link = Arc::clone(&self.link);
            runtime.spawn(async move { link.run(first, restore).await });
        }
    }

    /// The kernel's requests are about to come.
    pub(super) fn begin(&self) {
        if self.is_left.swap(false, Ordering::SeqCst) {
            self.run(None);
        }
    }

    /// Makes all durable that was answered, before another process goes on. An error: it cannot.
    pub fn settle(&self) -> Result<(), Errno> {
        let runtime = self.runtime.lock();
        runtime
            .as_ref()
            .map_or(Err(Errno(libc::ENOTCONN)), |runtime| runtime.block_on(self.link.synced_all()))
    }

    /// What another process needs to go on. No request of the kernel is under way, and none comes
    /// any more. Waits until the session is at rest, also for a server that is away, and leaves
    /// it. An error: the session is over.
    pub fn carry(&self) -> Result<Carried, Errno> {
        let runtime = self.runtime.lock().take().ok_or(Errno(libc::ENOTCONN))?;
        let ahead = self.tables.lock().ahead(None);
        ahead.into_iter().for_each(|ino| self.forget_known(ino, 1));
        self.tell_forgotten();
        let rested = runtime.block_on(self.link.at_rest());
        self.cache.drop_all();
        let mut to_forget = self.cache.lock().take_to_forget();
        to_forget.append(self.kernel.take_left());
        let carried = Carried::new(self.link.session(), to_forget, &self.tables.lock());
        runtime.shutdown_background();
        self.tell_losses();
        rested.map(|()| carried)
    }

    /// Ends the session, as an unmount does. Operations that wait, and later ones, fail.
    pub fn close(&self) {
        let runtime = self.runtime.lock().take();
        if let Some(runtime) = &runtime {
            let patient = !self.abandoned.load(Ordering::SeqCst);
            runtime.block_on(async {
                let _elapsed =
                    crate::rt::time::timeout(self.timeout, self.link.drained(patient)).await;
                if patient {
                    // A session without a goodbye keeps other clients waiting.
                    let _elapsed =
                        crate::rt::time::timeout(FAREWELL_TIME_MAX, self.link.reached()).await;
                }
            });
        }
        self.link.close();
        if let Some(runtime) = runtime {
            runtime.block_on(async {
                let told = self.link.told();
                let _elapsed = crate::rt::time::timeout(FAREWELL_TIME_MAX, told).await;
            });
            runtime.shutdown_background();
        }
    }

    /// Its process is killed: nothing of it goes on.
    #[cfg(test)]
    pub(crate) fn kill(&self) {
        if let Some(runtime) = self.runtime.lock().take() {
            runtime.shutdown_timeout(FAREWELL_TIME_MAX);
        }
    }

    /// The mount is to end at once: [`RemoteFs::close`] does not wait for a server that is away.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
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
                    let _elapsed =
                        crate::rt::time::timeout(FAREWELL_TIME_MAX, self.link.told()).await;
                });
            }
            runtime.shutdown_background();
        }
    }
}
