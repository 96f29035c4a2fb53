//! The system calls that neither the standard library nor rustix offers.

#![expect(unsafe_code, reason = "libc offers these calls with raw pointers only")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};

/// `FUSE_DEV_IOC_CLONE`: `_IOR(229, 0, uint32_t)`.
const DEV_IOC_CLONE: libc::c_ulong = 2 << 30 | 4 << 16 | 229 << 8;

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Makes `fresh`, a newly opened /dev/fuse, another descriptor of the mount that `session` serves.
pub(crate) fn clone_device(fresh: BorrowedFd<'_>, session: BorrowedFd<'_>) -> io::Result<()> {
    let number = session.as_raw_fd().cast_unsigned();
    // SAFETY: the request reads one u32, which outlives the call.
    check(unsafe { libc::ioctl(fresh.as_raw_fd(), DEV_IOC_CLONE, &raw const number) })
}

/// Gives the calling thread the scheduler's idle priority: it runs only on a core that is idle
/// otherwise.
pub(crate) fn idle_priority() -> io::Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameter outlives the call; 0 is the calling thread.
    check(unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const param) })
}

/// Moves a thread of this process to the real-time class, with the lowest priority there, or back
/// to the normal class. Threads that it starts are in the normal class.
pub(crate) fn set_realtime(thread: libc::pid_t, realtime: bool) -> io::Result<()> {
    let (policy, sched_priority) = match realtime {
        true => (libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, 1),
        false => (libc::SCHED_OTHER | libc::SCHED_RESET_ON_FORK, 0),
    };
    let param = libc::sched_param { sched_priority };
    // SAFETY: the parameter outlives the call.
    check(unsafe { libc::sched_setscheduler(thread, policy, &raw const param) })
}

/// What makes a thread look up from a wait. It does nothing else, also where nobody expects it.
const INTERRUPTS: libc::c_int = libc::SIGURG;

extern "C" fn do_nothing(_signal: libc::c_int) {}

/// From now on [`interrupt`] ends a system call in which a thread waits.
pub(crate) fn let_signals_interrupt() -> io::Result<()> {
    // SAFETY: all zero is an action without flags (so that calls are not restarted) and mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = do_nothing as *const () as libc::sighandler_t;
    // SAFETY: the action outlives the call, and its handler may run at any moment.
    check(unsafe { libc::sigaction(INTERRUPTS, &raw const action, std::ptr::null_mut()) })
}

/// Interrupts a thread of this process. If it has ended, nothing happens.
pub(crate) fn interrupt(thread: libc::pid_t) {
    let process = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: takes numbers.
    let _ended = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, INTERRUPTS) };
}

/// Another descriptor of what is open as this number, which another program has opened for this
/// one. Programs that this one starts do not get that number.
pub fn inherited(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: it is used for these two calls alone. If it is not open, both fail; if something of
    // this process has it, that loses nothing.
    let inherited = unsafe { BorrowedFd::borrow_raw(number) };
    let own = fcntl_dupfd_cloexec(inherited, 0)?;
    fcntl_setfd(inherited, FdFlags::CLOEXEC)?;
    Ok(own)
}

/// Leaves the calling thread without open files; other threads keep theirs.
pub(crate) fn forget_files() -> io::Result<()> {
    let flags = libc::CLOSE_RANGE_UNSHARE as libc::c_int;
    // SAFETY: takes numbers; what is closed is a table of this thread's own, which nothing in it
    // uses.
    check(unsafe { libc::close_range(0, libc::c_uint::MAX, flags) })
}

/// From here on this thread has this descriptor and no other, not even the standard ones: what the
/// process has open is closed when its other threads close it, whatever this one waits for.
pub(crate) fn leave_descriptors(but: BorrowedFd<'_>) -> io::Result<()> {
    let but = but.as_raw_fd() as libc::c_uint;
    // SAFETY: the thread gets a table of descriptors of its own. Nothing that it does from here on
    // uses another descriptor than those that stay.
    unsafe {
        check(libc::unshare(libc::CLONE_FILES))?;
        if but > 0 {
            check(libc::close_range(0, but - 1, 0))?;
        }
        check(libc::close_range(but + 1, libc::c_uint::MAX, 0))
    }
}
