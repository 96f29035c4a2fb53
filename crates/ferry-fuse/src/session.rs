//! A mount and the threads that serve it, from the handshake with the kernel to the end of the
//! mount.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ferry_fs::{Filesystem, Host, Ino};
use parking_lot::{Condvar, Mutex};
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
use crate::sys::let_signals_interrupt;
use crate::transport::dev::{self, DeviceWorker, Readers, Reading};
use crate::transport::memory::QueueMemory;
use crate::transport::uring::UringQueues;

/// Threads that serve /dev/fuse, for each core: some of them may wait for the disk.
const THREADS_PER_CORE: usize = 2;
/// How often a session that is handed over looks whether all requests have ended.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

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
    reading: Arc<Reading>,
    queues: Arc<Mutex<Option<UringQueues>>>,
    handing: Arc<HandingOver>,
}

/// How far a hand-over is that somebody has asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Handing {
    #[default]
    Not,
    /// The requests under way may take so long.
    Asked(Duration),
    /// They took longer.
    Refused,
    Done,
    /// The mount has ended: nobody decides any more.
    Over,
}

#[derive(Debug, Default)]
struct HandingOver {
    state: Mutex<Handing>,
    decided: Condvar,
}

impl HandingOver {
    fn decide(&self, how: Handing) {
        *self.state.lock() = how;
        self.decided.notify_all();
    }
}

/// What another process needs to go on with a mount, beside what the file system says.
#[derive(Debug)]
pub struct Connection {
    /// The connection with the kernel.
    pub device: OwnedFd,
    /// The memory of the queues.
    pub memory: OwnedFd,
}

impl Connection {
    /// Whether another process can go on if this one is killed. Without queues nobody knew which
    /// requests were under way; and the kernel must know how to forget all names.
    pub fn survives_a_kill(&self) -> bool {
        let agreed = QueueMemory::agreed(&self.memory);
        agreed.is_ok_and(|agreed| agreed.io_uring && agreed.forgets_all_names)
    }

    /// Whether this process can use the memory of the queues. An error leaves all as it was, so the
    /// program of before can go on.
    pub fn check(&self) -> Result<(), Error> {
        let memory = self.memory.try_clone().map_err(Error::Transport)?;
        QueueMemory::of(memory).map(drop).map_err(Error::Transport)
    }
}

/// How a [`Session`] has ended.
#[derive(Debug)]
pub enum Ended {
    /// The mount is gone, and the file system has been told so.
    Unmounted,
    /// The mount goes on in another process. No request is under way here.
    HandedOver(Connection),
}

impl MountHandle {
    /// Stops serving, so that another process can go on: what arrives from now on is left to it.
    /// `false`: not possible in this time, because requests are under way; they are served on.
    /// If it is possible, [`Session::wait`] returns. `file` is a regular file that some program has
    /// open until then. Without one the kernel may refuse a request that it has just sent.
    pub fn hand_over(&self, patience: Duration, file: Option<Ino>) -> Result<bool, Error> {
        if !self.host.rest(patience) {
            return Ok(false);
        }
        if self.queues.lock().as_ref().is_some_and(|queues| !queues.drain(patience, file)) {
            self.host.go_on();
            return Ok(false);
        }
        let done = self.stop_reading(patience);
        if !matches!(done, Ok(true)) {
            self.host.go_on();
            // Queues that have drained serve nobody.
            if let Some(queues) = &*self.queues.lock() {
                queues.resume();
            }
        }
        done.map_err(Error::Transport)
    }

    /// Stops the threads that read; `false`: what they have read has not ended in this time.
    fn stop_reading(&self, patience: Duration) -> io::Result<bool> {
        let_signals_interrupt()?;
        {
            let mut state = self.handing.state.lock();
            if *state == Handing::Over {
                return Ok(false);
            }
            *state = Handing::Asked(patience);
        }
        self.reading.stop();
        let mut state = self.handing.state.lock();
        self.handing.decided.wait_while(&mut state, |state| matches!(state, Handing::Asked(_)));
        Ok(*state == Handing::Done)
    }

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
    device: Arc<FuseDevice>,
    memory: Arc<QueueMemory>,
    counters: Arc<MountCounters>,
    readers: Readers,
    threads: usize,
    workers: Vec<JoinHandle<()>>,
    queues: Arc<Mutex<Option<UringQueues>>>,
    reading: Arc<Reading>,
    notifying: Vec<JoinHandle<()>>,
}

impl Running {
    fn connection(&self) -> io::Result<Connection> {
        let device = self.device.file().try_clone().map(OwnedFd::from)?;
        Ok(Connection { device, memory: self.memory.file()? })
    }

    /// Starts the threads that read. With io_uring queues these serve only FORGET and INTERRUPT; if
    /// the queues fail, the kernel sends every request here.
    fn read(&mut self) -> io::Result<()> {
        for i in 0..self.threads {
            let own = if i == 0 { Arc::clone(&self.device) } else { another(&self.device) };
            let (dispatcher, reading) = (Arc::clone(&self.dispatcher), Arc::clone(&self.reading));
            let (counters, readers) = (self.counters.block(), self.readers.clone());
            let worker = DeviceWorker::new(own, dispatcher, counters, readers, reading);
            self.workers.push(spawn(format!("fuse-{i}"), move || worker.run())?);
        }
        Ok(())
    }

    fn spawn(
        &mut self,
        host: &Arc<Notifier>,
        options: &MountOptions,
        uring: bool,
    ) -> io::Result<()> {
        self.read()?;
        let device = &self.device;
        if uring {
            let queues =
                UringQueues::start(device, &self.dispatcher, &self.counters, &self.memory)?;
            *self.queues.lock() = Some(queues);
            // Each queue has taken back what it found in its slots.
            self.dispatcher.fs.goes_on();
            let realtime = Arc::clone(&self.dispatcher.realtime);
            self.dispatcher.parked.start_sweep(move || realtime.watch())?;
        }
        for kind in NoticeKind::ALL {
            let (notifier, device) = (Arc::clone(host), Arc::clone(device));
            self.notifying.push(spawn("fuse-notify".into(), move || notifier.run(&device, kind))?);
        }
        if options.idle_poll && cores() > 1 {
            self.dispatcher.idle.start()?;
        }
        Ok(())
    }

    /// Waits until the kernel has ended the mount, or it is handed over, then ends the other
    /// threads.
    fn finish(mut self, handle: &MountHandle) -> Ended {
        let handed_over = loop {
            for worker in self.workers.drain(..) {
                worker.join().expect("a serving thread does not panic");
            }
            let asked = *handle.handing.state.lock();
            match asked {
                Handing::Asked(patience) if !self.has_ended_requests(patience) => {
                    self.reading.restart();
                    if let Err(error) = self.read() {
                        tracing::error!(%error, "the mount cannot be served on");
                    }
                    handle.handing.decide(Handing::Refused);
                }
                Handing::Asked(_) => break true,
                Handing::Not | Handing::Refused | Handing::Done | Handing::Over => break false,
            }
        };
        *handle.over.lock() = true;
        self.dispatcher.parked.interrupt_all();
        if let Some(queues) = self.queues.lock().take() {
            queues.stop();
        }
        if handed_over {
            self.dispatcher.fs.left_to_forget(handle.host.take_left());
        }
        handle.host.close();
        self.dispatcher.idle.stop();
        for notifying in self.notifying.drain(..) {
            notifying.join().expect("the notifying thread does not panic");
        }
        if handed_over {
            match self.connection() {
                Ok(connection) => {
                    handle.handing.decide(Handing::Done);
                    return Ended::HandedOver(connection);
                }
                Err(error) => tracing::error!(%error, "the mount cannot go on"),
            }
        }
        self.dispatcher.fs.detach();
        handle.handing.decide(Handing::Over);
        Ended::Unmounted
    }

    /// Whether the requests that the readers have left end in this time.
    fn has_ended_requests(&self, patience: Duration) -> bool {
        let looks = patience.as_millis() / LOOK_INTERVAL.as_millis();
        (0..=looks).any(|_| {
            let ended = self.dispatcher.parked.len() == 0;
            if !ended {
                thread::park_timeout(LOOK_INTERVAL);
            }
            ended
        })
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
        Self::start(fs, &mountpoint, device, options, None)
    }

    /// Goes on with the mount of another process, at an absolute path. Sends the mount no request.
    /// If this fails, the mount is as if this process was killed. Some of its requests may have
    /// been answered, and some threads may serve it until this process ends.
    pub fn go_on(
        fs: Arc<dyn Filesystem>,
        mountpoint: &Path,
        options: &MountOptions,
        before: Connection,
    ) -> Result<Self, Error> {
        let found = QueueMemory::of(before.memory).map_err(Error::Transport)?;
        let device = FuseDevice::from_file(before.device.into());
        Self::start(fs, mountpoint, device, options, Some(found))
    }

    fn start(
        fs: Arc<dyn Filesystem>,
        mountpoint: &Path,
        device: FuseDevice,
        options: &MountOptions,
        found: Option<(QueueMemory, Agreed)>,
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
        let goes_on = found.is_some();
        let (memory, agreed) = match found {
            Some(found) => found,
            None => begin(&device, &*fs, options).inspect_err(|_| {
                let undone = mount::unmount(mountpoint, Unmount::Lazy);
                tracing::debug!(?undone, "unmounted after a failed start");
                fs.detach();
            })?,
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
            reading: Arc::default(),
            queues: Arc::default(),
            handing: Arc::default(),
        };
        let readers = if agreed.io_uring {
            Readers::Gatherer(Arc::default())
        } else if remote {
            // Requests that wait for a server are parked: no thread waits, so one thread may lead.
            Readers::Leader(Arc::default())
        } else {
            Readers::All
        };
        let mut running = Running {
            dispatcher,
            device: Arc::new(device),
            memory: Arc::new(memory),
            counters: all,
            readers,
            threads: options.threads.unwrap_or(cores() * THREADS_PER_CORE).max(1),
            workers: Vec::new(),
            queues: Arc::clone(&handle.queues),
            reading: Arc::clone(&handle.reading),
            notifying: Vec::new(),
        };
        let spawned = running.spawn(&handle.host, options, agreed.io_uring);
        let session = Self { handle, running: Some(running) };
        if let Err(e) = spawned {
            if goes_on {
                // The caller knows whether yet another process can go on: the mount does not end.
                std::mem::forget(session);
                return Err(Error::Transport(e));
            }
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

    /// What another process needs to go on with the mount. `None`: it is gone.
    pub fn connection(&self) -> Result<Option<Connection>, Error> {
        self.running.as_ref().map(Running::connection).transpose().map_err(Error::Transport)
    }

    /// Returns when the mount is gone or is handed over.
    pub fn wait(mut self) -> Ended {
        self.finish()
    }

    fn finish(&mut self) -> Ended {
        self.running.take().map_or(Ended::Unmounted, |running| running.finish(&self.handle))
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

/// Makes the memory of the queues, and agrees with the kernel.
fn begin(
    device: &FuseDevice,
    fs: &dyn Filesystem,
    options: &MountOptions,
) -> Result<(QueueMemory, Agreed), Error> {
    let queues = match options.transport {
        Transport::Auto => UringQueues::possible(),
        Transport::Device => 0,
    };
    let memory = QueueMemory::new(queues.into()).or_else(|error| {
        tracing::debug!(%error, queues, "no memory for queues");
        QueueMemory::new(0)
    });
    let memory = memory.map_err(Error::Transport)?;
    let wishes = Wishes {
        writeback_cache: fs.writeback_cache(),
        is_shared: fs.is_shared(),
        io_uring: memory.queues() > 0,
    };
    let agreed = negotiate(device, wishes)?;
    memory.set_agreed(&agreed).map_err(Error::Transport)?;
    Ok((memory, agreed))
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

fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_of_another_layout_are_found_before_the_mount_is_used() {
        for is_agreed in [true, false] {
            let memory = QueueMemory::new(1).expect("memory");
            if is_agreed {
                memory.set_agreed(&Agreed::from_bits(0)).expect("it is written");
            }
            let device = fs::File::open("/dev/null").expect("it is there").into();
            let connection = Connection { device, memory: memory.file().expect("a descriptor") };
            drop(memory);
            for _ in 0..2 {
                assert_eq!(connection.check().is_ok(), is_agreed, "it changes nothing");
            }
        }
    }
}
