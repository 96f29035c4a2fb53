//! Changes that have to wait, for log space or for write-back, do so on threads of their own: a
//! transport's thread serves every program of a core, and whoever only reads is not to wait for a
//! checkpoint that others need.

use crate::api::{Answer, Cx, Filesystem, Interrupt, Parked, Reply, Stop};
use crate::inprocess::{FromReply, InProcess};
use crate::local::local_fs::LocalFs;
use crate::local::pool::Work;
use parking_lot::Mutex;
use std::sync::Arc;

/// Such a change, and its answer.
pub(crate) struct Change(Box<dyn FnOnce(&LocalFs) + Send>);

impl Work for Change {
    const NAME: &'static str = "ferry-change";
    /// So many stand in the rows for log space and for the cache, in the order in which they came;
    /// the others wait for them.
    const THREADS_MAX: usize = 32;
    const TOGETHER: bool = false;

    fn run(these: Vec<Self>, fs: &LocalFs) {
        these.into_iter().for_each(|change| (change.0)(fs));
    }
}

impl Change {
    /// Something that may wait.
    pub(crate) fn new(change: impl FnOnce(&LocalFs) + Send + 'static) -> Self {
        Self(Box::new(change))
    }
}

/// How far a change has come whose program may be killed meanwhile.
enum Progress {
    Waiting,
    /// Nobody waits for it any more.
    GivenUp,
    /// It was answered with this.
    Answered(Granted),
}

/// What an answer gave the program: a lookup of an inode, an open handle. If nobody hears it, they
/// are taken back.
#[derive(Clone, Copy, Default)]
struct Granted {
    ino: Option<u64>,
    fh: Option<u64>,
}

impl Granted {
    fn by(reply: &Reply) -> Self {
        match reply {
            Reply::Entry(entry) => Self { ino: entry.attr.map(|attr| attr.ino), fh: None },
            Reply::Created(entry, opened) => {
                Self { ino: entry.attr.map(|attr| attr.ino), fh: Some(opened.fh) }
            }
            _ => Self::default(),
        }
    }

    fn take_back(self, fs: &LocalFs) {
        if let Some(fh) = self.fh {
            fs.do_release(fh);
        }
        if let Some(ino) = self.ino {
            fs.forget(ino, 1);
        }
    }
}

impl LocalFs {
    /// Has a change made by a thread that may wait.
    pub(crate) fn later<T: Into<Reply> + FromReply>(
        &self,
        cx: &Cx,
        change: impl FnOnce(&Self, &Cx) -> Answer<T> + Send + 'static,
    ) -> Answer<T> {
        let Cx { uid, gid, umask, pid: caller, .. } = *cx;
        let caller = InProcess { uid, gid, umask, caller, ack: cx.early_ack() };
        let progress = Arc::new(Mutex::new(Progress::Waiting));
        let parked: Parked<Reply> = cx.park(Some(self.when_given_up(&progress)));
        self.changes.push(Change::new(move |fs| {
            if matches!(*progress.lock(), Progress::GivenUp) {
                return;
            }
            let result = caller.call(|cx| change(fs, cx)).map(Into::into);
            let granted = result.as_ref().map_or(Granted::default(), Granted::by);
            let before = std::mem::replace(&mut *progress.lock(), Progress::Answered(granted));
            match before {
                Progress::GivenUp => granted.take_back(fs),
                _ => parked.complete(result),
            }
        }));
        Err(Stop::Parked)
    }

    /// The program is being killed. What has not begun is not made; what was given to it is taken
    /// back, by whoever comes last.
    fn when_given_up(&self, progress: &Arc<Mutex<Progress>>) -> Interrupt {
        let (progress, changes) = (Arc::clone(progress), Arc::clone(&self.changes));
        Box::new(move || {
            if let Progress::Answered(granted) =
                std::mem::replace(&mut *progress.lock(), Progress::GivenUp)
            {
                changes.push(Change::new(move |fs| granted.take_back(fs)));
            }
        })
    }
}
