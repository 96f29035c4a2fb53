//! A mount and the threads that serve it, from the handshake with the kernel to the end of the
//! mount.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use ferry_fs::{Filesystem, Host};
use parking_lot::Mutex;
use zerocopy::IntoBytes;

use crate::abi::op;
use crate::decode::RequestArgs;
use crate::device::FuseDevice;
use crate::error::Error;
use crate::init::{self, Agreed, Wishes};
use crate::mount::{self, MountOptions, Transport, Unmount};
use crate::notify::{NoticeKind, Notifier};
use crate::request::counters::MountCounters;
use crate::request::crowd::Crowd;
use crate::request::direct_write::{DirectWrites, FilesystemTarget};
use crate::request::dispatch::Dispatcher;
use crate::request::idle_poll::IdlePoll;
use crate::request::parked::ParkTable;
use crate::request::realtime::RealTime;
use crate::request::trace::Tracer;
use crate::transport::dev::{self, DeviceWorker, Readers};
use crate::transport::uring::UringQueues;

/// Threads that serve /dev/fuse, for each core: some of them may wait for the disk.
const THREADS_PER_CORE: usize = 2;

/// A mounted file system. Dropping it unmounts (lazily) and waits.
#[derive(Debug)]
pub struct Session {
    handle: MountHandle,
    running: Option<Running>,
}

/// Unmounts from any thread, such as the one that waits for signals.
#[derive(Clone, Debug)]
pub struct MountHandle {
    mountpoint: Arc<PathBuf>,
    /// The mount is gone: another mount at the same mount point is not ours to unmount.
    over: Arc<Mutex<bool>>,
    host: Arc<Notifier>,
    tracer: Arc<Tracer>,
}

impl MountHandle {
    /// The requests that have ended behind the first `after` since somebody asked first, and how
    /// many of them are lost, as JSON. They are recorded for some seconds after each question.
    pub fn trace(&self, after: Option<u64>) -> serde_json::Value {
        self.tracer.ask(after)
    }

    /// Unmounts; [`Session::wait`] then returns. It is no error if the mount is gone already.
    pub fn unmount(&self, how: Unmount) -> Result<(), Error> {
        // Held during the call, so that this mount cannot end and another one begin in between.
        let over = self.over.lock();
        if *over {
            return Ok(());
        }
        match mount::unmount(&self.mountpoint, how) {
            Err(Error::NotMounted(_)) => Ok(()),
            result => result,
        }
    }

    /// The transport's statistics, as JSON.
    pub fn stats(&self) -> serde_json::Value {
        self.host.stats()
    }

    /// The mount point, as an absolute path.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }
}

struct Running {
    dispatcher: Arc<Dispatcher>,
    workers: Vec<JoinHandle<()>>,
    queues: Option<UringQueues>,
    notifying: Vec<JoinHandle<()>>,
}

impl Running {
    fn spawn(
        &mut self,
        device: Arc<FuseDevice>,
        host: &Arc<Notifier>,
        all: &MountCounters,
        options: &MountOptions,
        agreed: Agreed,
    ) -> io::Result<()> {
        // With io_uring queues these threads serve only FORGET and INTERRUPT; if the queues fail,
        // the kernel sends every request here.
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads.unwrap_or(cores * THREADS_PER_CORE).max(1);
        let readers = if agreed.io_uring {
            Readers::Gatherer(Arc::default())
        } else if self.dispatcher.remote {
            // Requests that wait for a server are parked: no thread waits, so one thread may lead.
            Readers::Leader(Arc::default())
        } else {
            Readers::All
        };
        for i in 0..threads {
            let own = if i == 0 { Arc::clone(&device) } else { another(&device) };
            let worker =
                DeviceWorker::new(own, Arc::clone(&self.dispatcher), all.block(), readers.clone());
            self.workers.push(spawn(format!("fuse-{i}"), move || worker.run())?);
        }
        if agreed.io_uring {
            self.queues = Some(UringQueues::start(&device, &self.dispatcher, all)?);
            let realtime = Arc::clone(&self.dispatcher.realtime);
            self.dispatcher.parked.start_sweep(move || realtime.watch())?;
        }
        for kind in NoticeKind::ALL {
            let (notifier, device) = (Arc::clone(host), Arc::clone(&device));
            self.notifying.push(spawn("fuse-notify".into(), move || notifier.run(&device, kind))?);
        }
        if options.idle_poll && cores > 1 {
            self.dispatcher.idle.start()?;
        }
        Ok(())
    }

    /// Waits until the kernel has ended the mount, then ends the other threads.
    fn finish(self, handle: &MountHandle) {
        for worker in self.workers {
            worker.join().expect("a serving thread does not panic");
        }
        *handle.over.lock() = true;
        self.dispatcher.parked.interrupt_all();
        if let Some(queues) = self.queues {
            queues.stop();
        }
        handle.host.close();
        self.dispatcher.idle.stop();
        for notifying in self.notifying {
            notifying.join().expect("the notifying thread does not panic");
        }
        self.dispatcher.fs.detach();
    }
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running").field("workers", &self.workers.len()).finish_non_exhaustive()
    }
}

impl Session {
    /// Mounts `fs`. When this returns, programs can use it.
    pub fn mount(
        fs: Arc<dyn Filesystem>,
        mountpoint: &Path,
        options: &MountOptions,
    ) -> Result<Self, Error> {
        let mount_error = |error| Error::Mount { mountpoint: mountpoint.into(), error };
        let mountpoint = fs::canonicalize(mountpoint).map_err(mount_error)?;
        let device = mount::mount(&mountpoint, options)?;
        Self::start(fs, &mountpoint, device, options)
    }

    fn start(
        fs: Arc<dyn Filesystem>,
        mountpoint: &Path,
        device: FuseDevice,
        options: &MountOptions,
    ) -> Result<Self, Error> {
        let all = Arc::new(MountCounters::default());
        let tracer = Arc::<Tracer>::default();
        let parked = Arc::new(ParkTable::new(all.block(), Arc::clone(&tracer)));
        let idle = Arc::new(IdlePoll::new(Arc::clone(&all), Crowd::of_machine()));
        let realtime = Arc::<RealTime>::default();
        let host = Arc::new(Notifier::new(
            Arc::clone(&all),
            &parked,
            Arc::clone(&idle),
            Arc::clone(&realtime),
        ));
        // Before the answer to INIT, because requests follow it at once.
        fs.attach(Arc::clone(&host) as Arc<dyn Host>);
        let wishes = Wishes {
            writeback_cache: fs.writeback_cache(),
            is_shared: fs.is_shared(),
            io_uring: options.transport == Transport::Auto && UringQueues::possible(),
        };
        let agreed = match negotiate(&device, wishes) {
            Ok(agreed) => agreed,
            Err(e) => {
                let undone = mount::unmount(mountpoint, Unmount::Lazy);
                tracing::debug!(?undone, "unmounted after a failed start");
                fs.detach();
                return Err(e);
            }
        };
        host.agreed(&agreed);
        let (remote, keeps_listings) = (fs.is_shared(), fs.keeps_listings());
        let direct_writes =
            DirectWrites::new(Arc::clone(&host) as _, Arc::new(FilesystemTarget(Arc::clone(&fs))));
        let dispatcher = Arc::new(Dispatcher {
            fs,
            parked,
            idle,
            realtime,
            tracer: Arc::clone(&tracer),
            setxattr_ext: agreed.setxattr_ext,
            directory_handles: !keeps_listings || !agreed.no_opendir,
            remote,
            direct_writes,
            host: Arc::clone(&host) as _,
            kernel: Arc::clone(&host) as _,
        });
        let handle = MountHandle {
            mountpoint: Arc::new(mountpoint.into()),
            over: Arc::default(),
            host,
            tracer,
        };
        let mut running =
            Running { dispatcher, workers: Vec::new(), queues: None, notifying: Vec::new() };
        let spawned = running.spawn(Arc::new(device), &handle.host, &all, options, agreed);
        let session = Self { handle, running: Some(running) };
        if let Err(e) = spawned {
            // By force: with some of its queues missing the mount would answer no request.
            let undone = session.handle.unmount(Unmount::Force);
            tracing::debug!(?undone, "unmounted after a failed start");
            return Err(Error::Transport(e));
        }
        Ok(session)
    }

    /// A handle for threads that may have to end the mount.
    pub fn handle(&self) -> MountHandle {
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

/// Answers the kernel's INIT.
fn negotiate(device: &FuseDevice, wishes: Wishes) -> Result<Agreed, Error> {
    let mut agreed = None;
    let answer = |head: &crate::abi::InHeader, body: &[u8]| {
        if head.opcode != op::INIT {
            return Err(Error::Handshake);
        }
        let (out, terms) = init::negotiate(RequestArgs::split(op::INIT, false, body), wishes)?;
        agreed = Some(terms);
        Ok(out.as_bytes().to_vec())
    };
    dev::handshake(device, answer, || Error::Handshake)?;
    agreed.ok_or(Error::Handshake)
}

fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name).spawn(body)
}

/// Another descriptor of the mount, or the same one where this process may not open the device
/// itself.
fn another(device: &Arc<FuseDevice>) -> Arc<FuseDevice> {
    device.try_clone().map_or_else(
        |error| {
            tracing::debug!(%error, "serving threads share a descriptor");
            Arc::clone(device)
        },
        Arc::new,
    )
}
