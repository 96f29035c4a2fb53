//! The caller's side of FerryFS's own ioctls: what `ferry sync` and `ferry stats` ask of a mounted volume.

#![expect(unsafe_code, reason = "ioctl(2) has no safe wrapper")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use ferry_fs::ioctl::{STATS, STATS_LEN, SYNC};

/// Makes everything on the volume durable; `file` is any file or directory of it. Waits.
pub fn sync(file: &File) -> io::Result<()> {
    // SAFETY: the request carries no memory.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(SYNC)) })
}

/// The counters of the mount that `file` is on, as JSON.
pub fn stats(file: &File) -> io::Result<Vec<u8>> {
    let mut answer = vec![0_u8; STATS_LEN as usize];
    // SAFETY: the request's number says that the kernel writes at most STATS_LEN bytes, which `answer` has and outlives the call.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::c_ulong::from(STATS), answer.as_mut_ptr()) })?;
    let end = answer.iter().position(|b| *b == 0).unwrap_or(answer.len());
    answer.truncate(end);
    Ok(answer)
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
        assert_eq!(stats(&here).expect_err("not ours").raw_os_error(), Some(libc::ENOTTY));
    }
}
