//! A mount and the threads that serve it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use ferry_fs::{Filesystem, Host};
use parking_lot::Mutex;
use zerocopy::IntoBytes;

use crate::abi::op;
use crate::core::Core;
use crate::counters::AllCounters;
use crate::decode::Args;
use crate::error::Error;
use crate::idle::IdlePoll;
use crate::init::{self, Agreed, Wishes};
use crate::mount::{self, MountOptions, Transport, Unmount};
use crate::notify::{Kind, Notifier};
use crate::park::ParkTable;
use crate::transport::dev::{self, Device, Worker};
use crate::transport::uring::Queues;

/// Threads that serve /dev/fuse, for each core: some may be waiting for the disk.
const THREADS_PER_CORE: usize = 2;

/// A mounted file system. Dropping it unmounts (lazily) and waits.
#[derive(Debug)]
pub struct Session {
    handle: Handle,
    running: Option<Running>,
}

/// Unmounts from any thread, such as the one that waits for signals.
#[derive(Clone, Debug)]
pub struct Handle {
    mountpoint: Arc<PathBuf>,
    /// The mount is gone: another one in its place is not ours to unmount.
    over: Arc<Mutex<bool>>,
    host: Arc<Notifier>,
}

impl Handle {
    /// Unmounts; [`Session::wait`] then returns. No error if that has happened already.
    pub fn unmount(&self, how: Unmount) -> Result<(), Error> {
        // Held over the call, so that the mount cannot end and another begin in between.
        let over = self.over.lock();
        if *over {
            return Ok(());
        }
        match mount::unmount(&self.mountpoint, how) {
            Err(Error::NotMounted(_)) => Ok(()),
            result => result,
        }
    }

    /// The transport's counters.
    pub fn stats(&self) -> serde_json::Value {
        self.host.stats()
    }

    /// Where it is mounted, as an absolute path.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }
}

struct Running {
    core: Arc<Core>,
    workers: Vec<JoinHandle<()>>,
    queues: Option<Queues>,
    notifying: Vec<JoinHandle<()>>,
}

impl Running {
    fn spawn(
        &mut self,
        device: Arc<Device>,
        host: &Arc<Notifier>,
        all: &AllCounters,
        options: &MountOptions,
        agreed: Agreed,
    ) -> io::Result<()> {
        // With queues, these are left with FORGET and INTERRUPT; should the queues fail, the kernel sends everything here.
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads.unwrap_or(cores * THREADS_PER_CORE).max(1);
        // What a server answers is parked: no thread waits for it.
        let lead = self.core.remote.then(Arc::default);
        for i in 0..threads {
            let own = if i == 0 { Arc::clone(&device) } else { another(&device) };
            let worker = Worker::new(own, Arc::clone(&self.core), all.block(), lead.clone());
            self.workers.push(spawn(format!("fuse-{i}"), move || worker.run())?);
        }
        if agreed.io_uring {
            self.queues = Some(Queues::start(&device, &self.core, all)?);
            self.core.parked.sweep_always()?;
        }
        for kind in Kind::ALL {
            let (notifier, device) = (Arc::clone(host), Arc::clone(&device));
            self.notifying.push(spawn("fuse-notify".into(), move || notifier.run(&device, kind))?);
        }
        if options.idle_poll && cores > 1 {
            self.core.idle.start()?;
        }
        Ok(())
    }

    /// Waits until the kernel has ended the mount, then ends the rest.
    fn finish(self, handle: &Handle) {
        for worker in self.workers {
            worker.join().expect("a serving thread does not panic");
        }
        *handle.over.lock() = true;
        self.core.parked.interrupt_all();
        if let Some(queues) = self.queues {
            queues.stop();
        }
        handle.host.close();
        self.core.idle.stop();
        for notifying in self.notifying {
            notifying.join().expect("the notifying thread does not panic");
        }
        self.core.fs.detach();
    }
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running").field("workers", &self.workers.len()).finish_non_exhaustive()
    }
}

impl Session {
    /// Mounts `fs`. When this returns, programs can use it.
    pub fn mount(fs: Arc<dyn Filesystem>, mountpoint: &Path, options: &MountOptions) -> Result<Self, Error> {
        let mount_error = |error| Error::Mount { mountpoint: mountpoint.into(), error };
        let mountpoint = fs::canonicalize(mountpoint).map_err(mount_error)?;
        let device = mount::mount(&mountpoint, options)?;
        Self::start(fs, &mountpoint, device, options)
    }

    fn start(
        fs: Arc<dyn Filesystem>,
        mountpoint: &Path,
        device: Device,
        options: &MountOptions,
    ) -> Result<Self, Error> {
        let all = Arc::new(AllCounters::default());
        let parked = Arc::new(ParkTable::new(all.block()));
        let idle = Arc::new(IdlePoll::new(Arc::clone(&all)));
        let host = Arc::new(Notifier::new(Arc::clone(&all), &parked, Arc::clone(&idle)));
        // Before INIT is answered, since requests follow it at once.
        fs.attach(Arc::clone(&host) as Arc<dyn Host>);
        let wishes = Wishes {
            writeback_cache: fs.writeback_cache(),
            is_shared: fs.is_shared(),
            io_uring: options.transport == Transport::Auto && Queues::possible(),
        };
        let agreed = match greet(&device, wishes) {
            Ok(agreed) => agreed,
            Err(e) => {
                let undone = mount::unmount(mountpoint, Unmount::Lazy);
                tracing::debug!(?undone, "unmounted after a failed start");
                fs.detach();
                return Err(e);
            }
        };
        host.agreed(&agreed);
        let remote = fs.is_shared();
        let core = Arc::new(Core { fs, parked, idle, setxattr_ext: agreed.setxattr_ext, remote });
        let handle = Handle { mountpoint: Arc::new(mountpoint.into()), over: Arc::default(), host };
        let mut running = Running { core, workers: Vec::new(), queues: None, notifying: Vec::new() };
        let spawned = running.spawn(Arc::new(device), &handle.host, &all, options, agreed);
        let session = Self { handle, running: Some(running) };
        if let Err(e) = spawned {
            // By force: with half of its queues the mount would answer nobody.
            let undone = session.handle.unmount(Unmount::Force);
            tracing::debug!(?undone, "unmounted after a failed start");
            return Err(Error::Transport(e));
        }
        Ok(session)
    }

    /// For threads that may have to end the mount.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Returns when the mount is gone and the file system has been told so.
    pub fn wait(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        if let Some(running) = self.running.take() {
            running.finish(&self.handle);
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.running.is_some() {
            if let Err(error) = self.handle.unmount(Unmount::Lazy) {
                tracing::error!(%error, "unmounting");
            }
            self.finish();
        }
    }
}

fn greet(device: &Device, wishes: Wishes) -> Result<Agreed, Error> {
    let mut agreed = None;
    let answer = |head: &crate::abi::InHeader, body: &[u8]| {
        if head.opcode != op::INIT {
            return Err(Error::Handshake);
        }
        let (out, terms) = init::negotiate(Args::split(op::INIT, false, body), wishes)?;
        agreed = Some(terms);
        Ok(out.as_bytes().to_vec())
    };
    dev::handshake(device, answer, || Error::Handshake)?;
    agreed.ok_or(Error::Handshake)
}

fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name).spawn(body)
}

/// Another descriptor of the mount, or the same one where this process may not open the device itself.
fn another(device: &Arc<Device>) -> Arc<Device> {
    device.try_clone().map_or_else(
        |error| {
            tracing::debug!(%error, "serving threads share a descriptor");
            Arc::clone(device)
        },
        Arc::new,
    )
}
