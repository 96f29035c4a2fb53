//! The attribute in which SELinux keeps a file's label.
//!
//! Where SELinux is active, the kernel answers for it itself. Elsewhere `ls -l` and others ask for
//! it file by file, until they hear that there are no labels here: that is `EOPNOTSUPP`. `ENODATA`
//! would mean that only this file has none. So the answer for a file without a label is
//! `EOPNOTSUPP`, and a listing costs one request a file less.

use ferry_fs::{Answer, Complete, Cx, Errno, Filesystem, Ino, Interrupt, Park, Stop};

/// The attribute's name.
pub(crate) const NAME: &[u8] = b"security.selinux";

/// A file's label.
pub(crate) fn get(fs: &dyn Filesystem, cx: &Cx<'_>, ino: Ino) -> Answer<Vec<u8>> {
    fs.getxattr(&Cx { park: &LabelPark(cx.park), ..*cx }, ino, NAME).map_err(|stop| match stop {
        Stop::Errno(errno) => Stop::Errno(no_labels(errno)),
        Stop::Parked => Stop::Parked,
    })
}

fn no_labels(errno: Errno) -> Errno {
    if errno.0 == libc::ENODATA { Errno(libc::EOPNOTSUPP) } else { errno }
}

/// Parks the request, and translates its answer.
struct LabelPark<'a>(&'a dyn Park);

impl Park for LabelPark<'_> {
    fn park(&self, interrupt: Option<Interrupt>) -> Complete {
        let complete = self.0.park(interrupt);
        Box::new(move |answer| complete(answer.map_err(no_labels)))
    }

    fn may_wait(&self) -> bool {
        self.0.may_wait()
    }

    fn request(&self) -> Option<ferry_fs::RequestId> {
        self.0.request()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferry_fs::Reply;
    use parking_lot::Mutex;
    use std::sync::Arc;

    /// Keeps the answer of the request that parked.
    #[derive(Clone, Default)]
    struct TestPark(Arc<Mutex<Option<Result<Reply, Errno>>>>);

    impl Park for TestPark {
        fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
            let stored = Arc::clone(&self.0);
            Box::new(move |answer| *stored.lock() = Some(answer))
        }

        fn request(&self) -> Option<ferry_fs::RequestId> {
            None
        }
    }

    #[test]
    fn a_parked_request_hears_that_there_are_no_labels() {
        let answer = |result| {
            let stored = TestPark::default();
            LabelPark(&stored).park(None)(result);
            stored.0.lock().take().expect("an answer")
        };
        let refused = |errno| answer(Err(Errno(errno))).expect_err("an error");
        assert_eq!(refused(libc::ENODATA), Errno(libc::EOPNOTSUPP));
        assert_eq!(refused(libc::EIO), Errno(libc::EIO));
        let label = answer(Ok(Reply::Data(b"label".into()))).expect("a value");
        assert!(matches!(label, Reply::Data(bytes) if bytes == b"label"));
    }
}
