#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use super::*;
use crate::file::cached::CachedFlushes;
use crate::{AlignedBuf, BLOCK_SIZE, FlushTimer};
use ferry_env::Env;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;

fn host(file: File) -> Arc<HostFile> {
    let (timer, env) = (FlushTimer::default(), Env::real());
    let for_rings = Arc::new(file.try_clone().expect("a descriptor"));
    Arc::new(HostFile {
        file,
        for_rings,
        _claim: None,
        block_device: false,
        timer,
        cached: None,
        env,
    })
}

/// Submits writes of the given offsets and a flush, each alone; gives the results in order.
fn results(engine: &Engine, offsets: &[u64]) -> Vec<io::Result<()>> {
    let (tx, rx) = mpsc::channel();
    let wait_for = |make: &mut dyn FnMut(crate::IoDone) -> Io| {
        let tx = tx.clone();
        engine.submit(vec![make(Box::new(move |result| tx.send(result).unwrap()))]);
        rx.recv().unwrap()
    };
    let mut results = Vec::new();
    for &offset in offsets {
        let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
        buf.fill(offset as u8 + 1);
        let buf = Arc::new(buf);
        results.push(wait_for(&mut |done| Io::Write { offset, buf: Arc::clone(&buf), done }));
    }
    results.push(wait_for(&mut |done| Io::Flush { done }));
    results
}

#[test]
fn without_io_uring_requests_are_executed_by_the_thread() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let host = host(file);
    let engine = Engine::start_with(Arc::clone(&host), false).unwrap();
    assert!(results(&engine, &[0, 8192]).iter().all(Result::is_ok));
    drop(engine);
    let mut bytes = vec![0; 3 * BLOCK_SIZE];
    host.file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes[..BLOCK_SIZE].iter().all(|&b| b == 1));
    assert!(bytes[BLOCK_SIZE..2 * BLOCK_SIZE].iter().all(|&b| b == 0));
    assert_eq!(host.timer.get().samples, 1);
}

#[test]
fn errors_keep_their_errno_on_both_ways() {
    for uring in [true, false] {
        // A full device, and one that cannot be flushed.
        let engine =
            Engine::start_with(host(File::options().write(true).open("/dev/full").unwrap()), uring)
                .unwrap();
        let errnos: Vec<_> = results(&engine, &[0])
            .into_iter()
            .map(|result| result.err().and_then(|e| e.raw_os_error()))
            .collect();
        assert_eq!(errnos, [Some(libc::ENOSPC), Some(libc::EINVAL)], "uring {uring}");
    }
}

#[test]
fn after_a_failed_flush_of_the_page_cache_no_submitted_one_succeeds() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    let cached = CachedFlushes::default();
    cached.flush(|| Err(io::Error::from_raw_os_error(libc::EIO))).unwrap_err();
    let mut host = host(file);
    Arc::get_mut(&mut host).unwrap().cached = Some(cached);
    let engine = Engine::start_with(host, true).unwrap();
    let last = results(&engine, &[0]).pop().unwrap();
    assert_eq!(last.unwrap_err().raw_os_error(), Some(libc::EIO));
}
