//! `ferry resize`: gives a volume another size; through the daemon or server that has it open, if
//! there is one.
//!
//! A volume that becomes smaller is emptied behind its new end in turns of half a second. Between
//! two of them it is as if nobody had asked, so Ctrl-C ends the command and harms nothing.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferry_env::Env;
use ferry_fs::ioctl::ResizeAnswer;
use ferry_fs::{Filesystem, FsOptions, InProcess, LocalFs, ROOT};
use ferry_fuse::control::{Ask, resize};
use indicatif::ProgressBar;

use crate::cli::{NewSize, ResizeArgs};
use crate::control::{Control, print};
use crate::error::CliError;
use crate::location::Location;
use crate::mounts;
use crate::open::{How, explain as explain_open, open_when_free};
use crate::size::format_bytes;
use crate::waiting::{progress_bar, stop_on_signals};
use crate::{mkfs, served};

/// The form of the progress bar.
const BAR: &str = "{bar:40} {pos}/{len} segments emptied  {eta} left";

/// Runs the command.
pub fn run(args: &ResizeArgs) -> Result<(), CliError> {
    let target = &args.target;
    let mount = mounts::of(target)?;
    let bytes = match args.size {
        NewSize::Max => 0,
        NewSize::Bytes(bytes) => bytes,
    };
    let stop = stop_on_signals()?;
    let size = match mount.is_some() || served::at(target)?.is_some() {
        true => {
            let control = Control::of(target)?;
            let explain = |e| control.explain("cannot resize", e);
            in_turns(target, || resize(&control, bytes), &stop, explain, refusal)?
        }
        false => {
            let turn = |fs: &Arc<LocalFs>| resize(&Own(fs.clone()), bytes);
            alone(target, turn, &stop, refusal)?
        }
    };
    let volume = mount.map_or_else(|| target.clone(), |mount| mount.volume());
    if let Some(path) = volume.path() {
        mkfs::warn_of_full_host(target, path, size);
    }
    print(&format!("{target}: {}\n", format_bytes(size)))
}

/// Does `turn` in this process, as [`in_turns`]: nobody else has the volume open.
pub fn alone(
    volume: &Location,
    turn: impl Fn(&Arc<LocalFs>) -> io::Result<ResizeAnswer>,
    stop: &AtomicBool,
    refusal: fn(ResizeAnswer) -> String,
) -> Result<u64, CliError> {
    let env = Env::real();
    let failed = |error: &dyn std::fmt::Display| CliError::Failed(format!("{volume}: {error}"));
    let opened = open_when_free(volume, How::Write, &env).map_err(|e| explain_open(volume, &e))?;
    // Clients of a server that is not running may use what was removed.
    let options = FsOptions { keeps_removed: true, ..FsOptions::default() };
    let fs = LocalFs::open(opened.device.clone(), options, env).map_err(|e| failed(&e))?;
    let resized = in_turns(volume, || turn(&fs), stop, |e| failed(&e), refusal);
    let closed = fs.close().map_err(|e| failed(&e));
    drop(fs);
    let closed = closed.and(opened.close().map_err(|e| failed(&e)));
    let size = resized?;
    closed.map(|()| size)
}

/// A volume that this process has open.
struct Own(Arc<LocalFs>);

impl Ask for Own {
    fn ask(&self, request: u32, message: &[u8]) -> io::Result<Vec<u8>> {
        let most = ferry_fs::ioctl::message_len(request);
        let me = InProcess::default();
        Ok(me.call(|cx| self.0.ioctl(cx, ROOT, request, message, most))?)
    }
}

/// Does turns until nothing is left to do. Returns the volume's size then.
fn in_turns(
    target: &Location,
    turn: impl Fn() -> io::Result<ResizeAnswer>,
    stop: &AtomicBool,
    explain: impl Fn(io::Error) -> CliError,
    refusal: fn(ResizeAnswer) -> String,
) -> Result<u64, CliError> {
    let bar = progress_bar(BAR);
    let refused = |why: String| CliError::Failed(format!("{target}: {why}"));
    let done = loop {
        let answer = turn().map_err(|e| match e.raw_os_error() {
            Some(libc::EOPNOTSUPP) => refused("what it lies on has one length for good".into()),
            Some(libc::EFBIG) => refused("what it lies on has no files of that size".into()),
            Some(libc::EBUSY) => {
                refused("a side of the mirror is being rebuilt: resize when that has ended".into())
            }
            _ => explain(e),
        });
        match answer {
            Ok(ResizeAnswer::Left(_)) if stop.load(Ordering::Relaxed) => {
                break Err(refused("stopped: it has the size that it had".into()));
            }
            Ok(ResizeAnswer::Left(left)) => show(&bar, left),
            Ok(ResizeAnswer::Done(size)) => break Ok(size),
            Ok(answer) => break Err(refused(refusal(answer))),
            Err(error) => break Err(error),
        }
    };
    bar.finish_and_clear();
    done
}

fn show(bar: &ProgressBar, left: u64) {
    let all = bar.length().unwrap_or(0).max(left);
    bar.set_length(all);
    bar.set_position(all - left);
}

/// Why the volume keeps its size.
pub fn refusal(answer: ResizeAnswer) -> String {
    let exactly = |bytes: u64| format!("{} ({bytes} bytes)", format_bytes(bytes));
    match answer {
        ResizeAnswer::TooSmall(bytes) => format!(
            "too small for what it holds and what it needs to work with: it has to have {}",
            exactly(bytes)
        ),
        ResizeAnswer::AtLeast(bytes) => format!(
            "what lies behind the data would move over itself: so small a step is not possible; the next size is {}",
            exactly(bytes)
        ),
        ResizeAnswer::AtMost(bytes) => format!("it can have at most {} now", exactly(bytes)),
        ResizeAnswer::Stuck(segment) => format!(
            "segment {segment} holds data that is damaged, which cannot move: `ferry scrub` says whose it is; remove it, or repair the \
             volume, and resize it again"
        ),
        ResizeAnswer::NoRoom => {
            "there is no room for what has to move: choose a larger size, or make room".into()
        }
        ResizeAnswer::HostFull => {
            "the file system on which it lies has no space for what has to move: make room there"
                .into()
        }
        ResizeAnswer::SizeWanted => "max is for a volume on a block device: say a size".into(),
        ResizeAnswer::Done(_) | ResizeAnswer::Left(_) => "it is being resized".into(),
    }
}
