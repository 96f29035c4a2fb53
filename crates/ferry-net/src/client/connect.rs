//! Mounting: a connection to the server and the runtime that serves it; and unmounting.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::rt::Mutex;
use ferry_env::Env;

use super::cache::Cache;
use super::kernel::Kernel;
use super::link::Link;
use super::remote::RemoteFs;
use super::restorer::Restorer;
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
        let shared = (Arc::clone(&cache), Arc::clone(&kernel));
        let link = Link::new(connector, clock, names, options.timeout, shared);
        let first = runtime
            .block_on(link.greet())
            .map_err(|error| NetError::Reach { server: server.clone(), error })?;
        let mut may_acknowledge = true;
        match &first.answer {
            ToClient::Refused { reason } => {
                let reason = String::from_utf8_lossy(reason).into_owned();
                return Err(NetError::Refused { server, reason });
            }
            // The mount's flags depend on it, before the link runs.
            ToClient::Welcome { read_only, early_acks, .. } => {
                link.set_read_only(*read_only);
                may_acknowledge = *early_acks && first.protocol.has_early_acks();
                link.set_early_acks(may_acknowledge);
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
            may_acknowledge,
            open_flags: if options.noatime { libc::O_NOATIME } else { 0 },
            timeout: options.timeout,
            lost: AtomicU64::new(0),
            losses: Mutex::default(),
            losses_are_known: AtomicBool::new(false),
            some_mapped: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            runtime: Mutex::default(),
        });
        let restore = Arc::new(Restorer(Arc::downgrade(&fs)));
        runtime.spawn(async move { link.run(first, restore).await });
        *fs.runtime.lock() = Some(runtime);
        let _granted = fs.set_asynchronous(options.asynchronous);
        Ok(fs)
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
