//! The library for C: `include/ferry_sync.h` is its description.
#![expect(unsafe_code, reason = "C calls with pointers; the header says what they must be")]

use crate::{Options, Summary};
use std::ffi::{c_int, c_uint, c_void};
use std::io;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

/// `FERRY_SYNC_DATA`.
const DATA: c_uint = 1;

/// `ferry_sync_done`.
type Done = extern "C" fn(context: *mut c_void, index: usize, error: c_int);

/// `ferry_sync_pending`.
pub struct Pending(JoinHandle<Summary>);

/// The caller's context, which it lets another thread have.
struct Context(*mut c_void);

// SAFETY: the header says that `done` is called on another thread with it.
unsafe impl Send for Context {}

/// Options for the flags, if they are known.
fn options(flags: c_uint) -> Option<Options> {
    // The caller's files are open already.
    (flags & !DATA == 0).then(|| Options {
        data_only: flags & DATA != 0,
        open_files: usize::MAX,
        ..Options::default()
    })
}

/// Those that are open. To be asked before anything is opened here: it might get the number of one that is not.
fn borrow(fds: Vec<c_int>) -> Vec<io::Result<BorrowedFd<'static>>> {
    let borrow_one = |fd| {
        // SAFETY: carries no memory.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: open, therefore not -1; the header says that files stay open until they are answered.
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
        // SAFETY: the caller's promise.
        (_, false) => Some(unsafe { std::slice::from_raw_parts(fds, n) }.to_vec()),
    }
}

/// See the header.
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

/// See the header.
///
/// # Safety
/// `fds` points to `n` numbers of files that stay open until they are answered, `pending` to a pointer; `context` is what `done` wants.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_sync_start(
    fds: *const c_int,
    n: usize,
    flags: c_uint,
    done: Option<Done>,
    context: *mut c_void,
    pending: *mut *mut Pending,
) -> c_int {
    // SAFETY: as above.
    let (Some(options), Some(fds), Some(done)) = (options(flags), unsafe { numbers(fds, n) }, done) else {
        return -libc::EINVAL;
    };
    if pending.is_null() {
        return -libc::EINVAL;
    }
    let context = Context(context);
    let files = borrow(fds).into_iter().enumerate();
    let tell = move |at, result: io::Result<()>| {
        let Context(context) = &context;
        done(*context, at, errno(&result));
    };
    match crate::start(files, options, tell) {
        Ok(thread) => {
            // SAFETY: as above.
            unsafe { pending.write(Box::into_raw(Box::new(Pending(thread)))) };
            0
        }
        Err(error) => -error.raw_os_error().unwrap_or(libc::EAGAIN),
    }
}

/// See the header.
///
/// # Safety
/// `pending` comes from [`ferry_sync_start`] and is not used after this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ferry_sync_wait(pending: *mut Pending) -> c_int {
    if pending.is_null() {
        return -libc::EINVAL;
    }
    // SAFETY: as above.
    let pending = unsafe { Box::from_raw(pending) };
    pending.0.join().map_or(-libc::EIO, failed)
}
