//! The system calls that the standard library does not offer: mounting, cloning the device, passing
//! a descriptor.

#![expect(unsafe_code, reason = "libc offers these calls with raw pointers only")]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// `FUSE_DEV_IOC_CLONE`: `_IOR(229, 0, uint32_t)`.
const DEV_IOC_CLONE: libc::c_ulong = 2 << 30 | 4 << 16 | 229 << 8;

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn c_path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// The effective user and group of this process.
pub(crate) fn ids() -> (u32, u32) {
    // SAFETY: both calls take nothing and cannot fail.
    unsafe { (libc::geteuid(), libc::getegid()) }
}
pub(crate) fn mount(
    source: &str,
    target: &Path,
    kind: &CStr,
    flags: libc::c_ulong,
    data: &str,
) -> io::Result<()> {
    let (source, target, data) = (CString::new(source)?, c_path(target)?, CString::new(data)?);
    // SAFETY: all four are NUL-terminated strings that outlive the call.
    check(unsafe {
        libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, data.as_ptr().cast())
    })
}
pub(crate) fn umount(target: &Path, flags: libc::c_int) -> io::Result<()> {
    let target = c_path(target)?;
    // SAFETY: a NUL-terminated string that outlives the call.
    check(unsafe { libc::umount2(target.as_ptr(), flags) })
}

/// Makes `fresh`, a newly opened /dev/fuse, another descriptor of the mount that `session` serves.
pub(crate) fn clone_device(fresh: BorrowedFd<'_>, session: BorrowedFd<'_>) -> io::Result<()> {
    let number = session.as_raw_fd().cast_unsigned();
    // SAFETY: the request reads one u32, which outlives the call.
    check(unsafe { libc::ioctl(fresh.as_raw_fd(), DEV_IOC_CLONE, &raw const number) })
}

/// Lets child programs inherit the descriptor.
pub(crate) fn keep_on_exec(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the descriptor is open, and F_SETFD takes an int.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, 0) })
}

/// Receives one descriptor; `None` if the other side closed without sending one.
pub(crate) fn receive_fd(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0_u8; 1];
    let mut iov = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: byte.len() };
    let mut control = [0_u64; 8]; // room for one descriptor, aligned as cmsghdr wants it
    // SAFETY: msghdr is plain data; zero is "nothing" in each field.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the message points at buffers of the lengths it says, which outlive the call.
    let got =
        unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: recvmsg filled the message; CMSG_FIRSTHDR checks that a whole header is there.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    if header.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, and inside `control`.
    let (level, kind) = unsafe { ((*header).cmsg_level, (*header).cmsg_type) };
    if level != libc::SOL_SOCKET || kind != libc::SCM_RIGHTS {
        return Ok(None);
    }
    // SAFETY: a rights message carries at least one descriptor, which is now ours alone.
    let fd =
        unsafe { OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()) };
    Ok(Some(fd))
}

/// Pins the calling thread to one core.
pub(crate) fn pin_to_core(core: usize) -> io::Result<()> {
    // SAFETY: cpu_set_t is plain data; zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if core >= libc::CPU_SETSIZE as usize {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: the core's number is below the set's size.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: the set outlives the call; 0 is the calling thread.
    check(unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) })
}

/// Gives the calling thread the scheduler's idle priority: it runs only on a core that is idle
/// otherwise.
pub(crate) fn idle_priority() -> io::Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameter outlives the call; 0 is the calling thread.
    check(unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const param) })
}

/// Leaves the calling thread without open files; other threads keep theirs.
pub(crate) fn forget_files() -> io::Result<()> {
    let flags = libc::CLOSE_RANGE_UNSHARE as libc::c_int;
    // SAFETY: takes numbers; what is closed is a table of this thread's own, which nothing in it
    // uses.
    check(unsafe { libc::close_range(0, libc::c_uint::MAX, flags) })
}

/// eventfd(2): a counter that one thread waits for and others increment.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: takes two numbers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just opened, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
