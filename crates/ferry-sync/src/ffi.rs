//! The library for C, which `include/ferry_sync.h` describes.
#![expect(unsafe_code, reason = "C calls with pointers; the header says what they must be")]

use crate::{Options, Summary};
use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

/// The flag `FERRY_SYNC_DATA` of the header.
const DATA: c_uint = 1;

/// `ferry_sync_done` of the header.
type DoneCallback = extern "C" fn(context: *mut c_void, index: usize, error: c_int);

/// `ferry_sync_pending` of the header.
pub struct PendingSync(JoinHandle<Summary>);

/// The caller's context pointer, which another thread passes to `done`.
struct CallerContext(*mut c_void);

// SAFETY: the header says that another thread calls `done` with it.
unsafe impl Send for CallerContext {}

/// The options for `flags`; `None`: an unknown flag is set.
fn options(flags: c_uint) -> Option<Options> {
    // The caller's files are open already.
    (flags & !DATA == 0).then(|| Options {
        data_only: flags & DATA != 0,
        open_files: usize::MAX,
        ..Options::default()
    })
}

/// Borrows the descriptors that are open. Call it before this process opens anything: a new
/// descriptor might get the number of one that is closed.
fn borrow(fds: Vec<c_int>) -> Vec<io::Result<BorrowedFd<'static>>> {
    let borrow_one = |fd| {
        // SAFETY: carries no memory.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: open, therefore not -1; the header says that files stay open until they are
        // answered.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    };
    fds.into_iter().map(borrow_one).collect()
}

fn errno(result: &io::Result<()>) -> c_int {
    result.as_ref().map_or_else(|e| e.raw_os_error().unwrap_or(libc::EIO), |()| 0)
}

fn failed(summary: Summary) -> c_int {
    c_int::try_from(summary.failed).unwrap_or(c_int::MAX)
}

/// # Safety
/// `fds` points to `n` numbers, or `n` is 0.
unsafe fn numbers(fds: *const c_int, n: usize) -> Option<Vec<c_int>> {
    match (n, fds.is_null()) {
        (0, _) => Some(Vec::new()),
        (_, true) => None,
        // SAFETY: the caller's contract.
        (_, false) => Some(unsafe { std::slice::from_raw_parts(fds, n) }.to_vec()),
    }
}

/// See `include/ferry_sync.h`.
///
/// # Safety
/// `fds` points to `n` numbers of open files, `errs` to `n` numbers or nowhere.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_sync_files(
    fds: *const c_int,
    n: usize,
    errs: *mut c_int,
    flags: c_uint,
) -> c_int {
    // SAFETY: as above.
    let (Some(options), Some(fds)) = (options(flags), unsafe { numbers(fds, n) }) else {
        return -libc::EINVAL;
    };
    let mut errnos = vec![libc::EIO; n];
    let synced = catch_unwind(AssertUnwindSafe(|| {
        let files = borrow(fds).into_iter().enumerate();
        crate::sync_each(files, &options, |at, result| errnos[at] = errno(&result))
    }));
    if !errs.is_null() {
        // SAFETY: as above; `errnos` has `n` numbers too.
        unsafe { std::ptr::copy_nonoverlapping(errnos.as_ptr(), errs, n) };
    }
    synced.map_or(-libc::EIO, failed)
}

/// See `include/ferry_sync.h`.
///
/// # Safety
/// `fds` points to `n` numbers of files that stay open until they are answered, `pending` to a
/// pointer; `done` accepts `context`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_sync_start(
    fds: *const c_int,
    n: usize,
    flags: c_uint,
    done: Option<DoneCallback>,
    context: *mut c_void,
    pending: *mut *mut PendingSync,
) -> c_int {
    // SAFETY: as above.
    let (Some(options), Some(fds), Some(done)) = (options(flags), unsafe { numbers(fds, n) }, done)
    else {
        return -libc::EINVAL;
    };
    if pending.is_null() {
        return -libc::EINVAL;
    }
    let context = CallerContext(context);
    let files = borrow(fds).into_iter().enumerate();
    let tell = move |at, result: io::Result<()>| {
        let CallerContext(context) = &context;
        done(*context, at, errno(&result));
    };
    match crate::start(files, options, tell) {
        Ok(thread) => {
            // SAFETY: as above.
            unsafe { pending.write(Box::into_raw(Box::new(PendingSync(thread)))) };
            0
        }
        Err(error) => -error.raw_os_error().unwrap_or(libc::EAGAIN),
    }
}

/// See `include/ferry_sync.h`.
///
/// # Safety
/// `pending` comes from [`ferry_sync_start`] and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_sync_wait(pending: *mut PendingSync) -> c_int {
    if pending.is_null() {
        return -libc::EINVAL;
    }
    // SAFETY: as above.
    let pending = unsafe { Box::from_raw(pending) };
    pending.0.join().map_or(-libc::EIO, failed)
}
