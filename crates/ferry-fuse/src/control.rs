//! The caller's side of FerryFS's own ioctls: what `ferry sync`, `ferry stats`, `ferry scrub`, `ferry replace` and `ferry tune` ask of a
//! mounted volume.

#![expect(unsafe_code, reason = "ioctl(2) has no safe wrapper")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use ferry_fs::FlushPolicy;
use ferry_fs::ioctl::{
    GROW_LOG, REPLACE, REPLACE_LEN, SCRUB_DAMAGE, SCRUB_START, SCRUB_STATUS, SCRUB_STOP, STATS, STATS_LEN,
    SYNC, TUNE, TUNE_FAST_FLUSH, TUNE_FLUSH, TUNE_LEN, TUNE_RESET_FLUSH_TIME,
};

/// Makes everything on the volume durable; `file` is any file or directory of it. Waits.
pub fn sync(file: &File) -> io::Result<()> {
    // SAFETY: the request carries no memory.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(SYNC)) })
}

/// The counters of the mount that `file` is on, as JSON.
pub fn stats(file: &File) -> io::Result<Vec<u8>> {
    text(file, STATS, 0)
}

/// Starts a scrub that reads at most so many bytes a second (0: as many as it can); its number. `EBUSY`: one is on its way, `EPERM`:
/// the caller is neither root nor who has mounted the volume.
pub fn scrub_start(file: &File, rate: u64) -> io::Result<u64> {
    let mut number = rate;
    // SAFETY: the request's number says that the kernel reads and writes 8 bytes, which `number` has and outlives the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(SCRUB_START), &raw mut number) })?;
    Ok(number)
}

/// Stops the scrub that is on its way; does not wait for its end.
pub fn scrub_stop(file: &File) -> io::Result<()> {
    // SAFETY: the request carries no memory.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(SCRUB_STOP)) })
}

/// What the newest scrub is at, as JSON.
pub fn scrub_status(file: &File) -> io::Result<Vec<u8>> {
    text(file, SCRUB_STATUS, 0)
}

/// Damage that the newest scrub found, from this place in its list on, as a JSON list; empty: no more.
pub fn scrub_damage(file: &File, from: u64) -> io::Result<Vec<u8>> {
    text(file, SCRUB_DAMAGE, from)
}

/// A request that may say a number and is answered with text.
fn text(file: &File, request: u32, number: u64) -> io::Result<Vec<u8>> {
    let mut answer = vec![0_u8; STATS_LEN as usize];
    answer[..8].copy_from_slice(&number.to_ne_bytes());
    // SAFETY: each of these requests' numbers says that the kernel reads and writes at most STATS_LEN bytes, which `answer` has and
    // outlives the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(request), answer.as_mut_ptr()) })?;
    let end = answer.iter().position(|b| *b == 0).unwrap_or(answer.len());
    answer.truncate(end);
    Ok(answer)
}

/// Begins to rebuild a mirror's side `old` on `new`, both absolute paths.
pub fn replace(file: &File, old: &Path, new: &Path) -> io::Result<()> {
    let mut message = Vec::with_capacity(REPLACE_LEN as usize);
    for path in [old, new] {
        message.extend_from_slice(path.as_os_str().as_bytes());
        message.push(0);
    }
    if message.len() > REPLACE_LEN as usize {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    message.resize(REPLACE_LEN as usize, 0);
    // SAFETY: the request's number says that the kernel reads REPLACE_LEN bytes, which `message` has and outlives the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(REPLACE), message.as_ptr()) })
}

/// What [`tune`] changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tune {
    /// The flush policy.
    pub flush: Option<FlushPolicy>,
    /// Below this average time of a flush the policy `delay` does not wait.
    pub fast_flush: Option<Duration>,
    /// Forget how long flushes took.
    pub reset_flush_time: bool,
}

/// Changes how the volume that `file` is on flushes. `EPERM`: the caller is neither root nor the owner of its root directory.
pub fn tune(file: &File, asked: &Tune) -> io::Result<()> {
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
    // SAFETY: the request's number says that the kernel reads TUNE_LEN bytes, which `message` has and outlives the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(TUNE), message.as_ptr()) })
}

/// Has the log of the volume that `file` is on grow to `bytes`; returns when it has. Errors: [`ferry_fs::ioctl::GROW_LOG`].
pub fn grow_log(file: &File, bytes: u64) -> io::Result<()> {
    // SAFETY: the request's number says that the kernel reads 8 bytes, which `bytes` has and outlives the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(GROW_LOG), std::ptr::from_ref(&bytes)) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_file_system_does_not_know_the_requests() {
        let here = File::open("/proc").expect("proc is mounted");
        assert_eq!(sync(&here).expect_err("not ours").raw_os_error(), Some(libc::ENOTTY));
        let (old, new) = (Path::new("/a"), Path::new("/b"));
        assert_eq!(replace(&here, old, new).expect_err("not ours").raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(tune(&here, &Tune::default()).expect_err("not ours").raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(stats(&here).expect_err("not ours").raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(scrub_start(&here, 1).expect_err("not ours").raw_os_error(), Some(libc::ENOTTY));
        assert_eq!(scrub_stop(&here).expect_err("not ours").raw_os_error(), Some(libc::ENOTTY));
    }
}
