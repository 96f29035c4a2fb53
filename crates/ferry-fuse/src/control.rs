//! The caller's side of FerryFS's own requests, which `ferry sync`, `ferry stats`, `ferry scrub`,
//! `ferry replace`, `ferry resize`, `ferry trim`, `ferry tune` and `ferry snapshot` send to the
//! process that has a volume open.
//! [`ferry_fs::Filesystem::ioctl`] answers them all; [`Ask`] is the way there.

#![expect(unsafe_code, reason = "ioctl(2) has no safe wrapper")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

pub use ferry_device::Warmed;
use ferry_fs::FlushPolicy;
use ferry_fs::ioctl::{
    GROW_LOG, REPLACE, REPLACE_LEN, RESIZE, ResizeAnswer, SCRUB_DAMAGE, SCRUB_START, SCRUB_STATUS,
    SCRUB_STOP, SNAPSHOT_CREATE, SNAPSHOT_DELETE, SNAPSHOT_LIST, STATS, SYNC, TRIM, TUNE,
    TUNE_FAST_FLUSH, TUNE_FLUSH, TUNE_LEN, TUNE_RESET_FLUSH_TIME, WAIT, WAIT_FILE, WARM,
    WARM_BEGINS, message_len,
};

/// A connection to the process that has a volume open.
pub trait Ask {
    /// Sends one of the requests of [`ferry_fs::ioctl`], with its message, and waits for the
    /// answer, which may have any bytes behind its end.
    fn ask(&self, request: u32, message: &[u8]) -> io::Result<Vec<u8>>;
}

/// Through a mount: any file or directory of it.
impl Ask for File {
    fn ask(&self, request: u32, message: &[u8]) -> io::Result<Vec<u8>> {
        let mut memory = message.to_vec();
        memory.resize(message_len(request).max(message.len()), 0);
        // SAFETY: the kernel reads and writes at most as many bytes as the request's number says;
        // `memory` has that many and outlives the call. Other file systems that define such numbers
        // obey that, too.
        let result = unsafe {
            libc::ioctl(self.as_raw_fd(), libc::c_ulong::from(request), memory.as_mut_ptr())
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(memory) }
    }
}

/// Makes everything on the volume durable; waits until it is.
pub fn sync(volume: &impl Ask) -> io::Result<()> {
    volume.ask(SYNC, &[]).map(drop)
}

/// Waits until everything that the volume has now is durable, and makes nothing durable for it.
/// `EOPNOTSUPP`: the mount has `cache=writeback`. `ENOTTY`: it is a remote mount, or no FerryFS.
pub fn wait_durable(volume: &impl Ask) -> io::Result<()> {
    volume.ask(WAIT, &[]).map(drop)
}

/// As [`wait_durable`], for one file or directory.
pub fn wait_file_durable(file: &File) -> io::Result<()> {
    file.ask(WAIT_FILE, &[]).map(drop)
}

/// The statistics of the volume, as JSON.
pub fn stats(volume: &impl Ask) -> io::Result<Vec<u8>> {
    text(volume, STATS, 0)
}

/// Starts a scrub that reads at most `rate` bytes a second (0: as many as it can); returns its
/// number. `EBUSY`: a scrub is running. `EPERM`: the caller is neither root nor the user who
/// mounted the volume.
pub fn scrub_start(volume: &impl Ask, rate: u64) -> io::Result<u64> {
    volume.ask(SCRUB_START, &rate.to_ne_bytes()).and_then(|answer| number(&answer))
}

/// Stops the scrub that is running; does not wait for its end.
pub fn scrub_stop(volume: &impl Ask) -> io::Result<()> {
    volume.ask(SCRUB_STOP, &[]).map(drop)
}

/// The progress of the newest scrub, as JSON.
pub fn scrub_status(volume: &impl Ask) -> io::Result<Vec<u8>> {
    text(volume, SCRUB_STATUS, 0)
}

/// The damage that the newest scrub found, from index `from` of its list on, as a JSON list; empty:
/// no more.
pub fn scrub_damage(volume: &impl Ask, from: u64) -> io::Result<Vec<u8>> {
    text(volume, SCRUB_DAMAGE, from)
}

/// A request that carries a number and is answered with text.
fn text(volume: &impl Ask, request: u32, number: u64) -> io::Result<Vec<u8>> {
    let mut answer = volume.ask(request, &number.to_ne_bytes())?;
    let end = answer.iter().position(|b| *b == 0).unwrap_or(answer.len());
    answer.truncate(end);
    Ok(answer)
}

fn number(answer: &[u8]) -> io::Result<u64> {
    let number = answer.first_chunk().ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(u64::from_ne_bytes(*number))
}

/// Begins to rebuild a mirror's side `old` on `new`. Both are absolute paths.
pub fn replace(volume: &impl Ask, old: &Path, new: &Path) -> io::Result<()> {
    let mut message = Vec::with_capacity(REPLACE_LEN as usize);
    for path in [old, new] {
        message.extend_from_slice(path.as_os_str().as_bytes());
        message.push(0);
    }
    if message.len() > REPLACE_LEN as usize {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    volume.ask(REPLACE, &message).map(drop)
}

/// The changes that [`tune`] asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TuneRequest {
    /// The flush policy.
    pub flush: Option<FlushPolicy>,
    /// If flushes take less than this on average, the policy `delay` does not wait.
    pub fast_flush: Option<Duration>,
    /// Discard the measured flush times.
    pub reset_flush_time: bool,
}

/// Changes how the volume flushes. `EPERM`: the caller is neither root nor the user who mounted the
/// volume.
pub fn tune(volume: &impl Ask, asked: &TuneRequest) -> io::Result<()> {
    let (mut what, mut message) = (0, [0_u8; TUNE_LEN as usize]);
    if let Some(policy) = asked.flush {
        what |= TUNE_FLUSH;
        let number = FlushPolicy::ALL.iter().position(|p| *p == policy).unwrap_or_default() as u32;
        message[4..8].copy_from_slice(&number.to_ne_bytes());
    }
    if let Some(time) = asked.fast_flush {
        what |= TUNE_FAST_FLUSH;
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        message[8..].copy_from_slice(&nanos.to_ne_bytes());
    }
    if asked.reset_flush_time {
        what |= TUNE_RESET_FLUSH_TIME;
    }
    message[..4].copy_from_slice(&what.to_ne_bytes());
    volume.ask(TUNE, &message).map(drop)
}

/// Grows the volume's log to `bytes`; returns when it has grown. Errors:
/// [`ferry_fs::ioctl::GROW_LOG`].
pub fn grow_log(volume: &impl Ask, bytes: u64) -> io::Result<()> {
    volume.ask(GROW_LOG, &bytes.to_ne_bytes()).map(drop)
}

/// Gives the volume `bytes`, or all that its device has if that is 0; or does a part of the work
/// for it. Errors: [`ferry_fs::ioctl::RESIZE`].
pub fn resize(volume: &impl Ask, bytes: u64) -> io::Result<ResizeAnswer> {
    let answer = volume.ask(RESIZE, &bytes.to_ne_bytes())?;
    ResizeAnswer::decode(&answer).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Returns the space of free segments to the host; gives the number of bytes. `EPERM`: as [`tune`].
pub fn trim(volume: &impl Ask) -> io::Result<u64> {
    volume.ask(TRIM, &[]).and_then(|answer| number(&answer))
}

/// Brings a range of the contents of files, by their inode numbers, into the volume's cache on a
/// local disk. `begins`: what was warmed before may leave it. Errors: [`ferry_fs::ioctl::WARM`].
pub fn warm(
    volume: &impl Ask,
    begins: bool,
    range: &Range<u64>,
    files: &[u64],
) -> io::Result<Warmed> {
    let flags = if begins { WARM_BEGINS } else { 0 };
    let words = [flags, range.start, range.end - range.start].into_iter();
    let message = words.chain(files.iter().copied()).flat_map(u64::to_ne_bytes).collect::<Vec<_>>();
    if message.len() > message_len(WARM) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let answer = volume.ask(WARM, &message)?;
    let word = |n: usize| answer.get(8 * n..).map_or(Ok(0), number);
    Ok(Warmed { fetched_bytes: word(0)?, cached_bytes: word(1)?, full: word(2)? != 0 })
}

/// Makes everything on the volume durable, and a snapshot of it. Errors:
/// [`ferry_fs::ioctl::SNAPSHOT_CREATE`].
pub fn snapshot_create(volume: &impl Ask, name: &str) -> io::Result<()> {
    volume.ask(SNAPSHOT_CREATE, name.as_bytes()).map(drop)
}

/// Deletes a snapshot of the volume. `ENOENT`: there is none of this name.
pub fn snapshot_delete(volume: &impl Ask, name: &str) -> io::Result<()> {
    volume.ask(SNAPSHOT_DELETE, name.as_bytes()).map(drop)
}

/// The snapshots of the volume from index `from` on, as a JSON list; empty: no more.
pub fn snapshot_list(volume: &impl Ask, from: u64) -> io::Result<Vec<u8>> {
    text(volume, SNAPSHOT_LIST, from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_file_system_does_not_know_the_requests() {
        let here = File::open("/proc").expect("proc is mounted");
        assert_eq!(sync(&here).expect_err("not ours").raw_os_error(), Some(libc::ENOTTY));
        let (old, new) = (Path::new("/a"), Path::new("/b"));
        assert_eq!(
            replace(&here, old, new).expect_err("not ours").raw_os_error(),
            Some(libc::ENOTTY)
        );
        assert_eq!(
            tune(&here, &TuneRequest::default()).expect_err("not ours").raw_os_error(),
            Some(libc::ENOTTY)
        );
        assert_eq!(stats(&here).expect_err("not ours").raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(scrub_start(&here, 1).expect_err("not ours").raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(scrub_stop(&here).expect_err("not ours").raw_os_error(), Some(libc::ENOTTY));
    }
}
