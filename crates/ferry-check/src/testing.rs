//! What tests make on a volume.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use ferry_device::BlockDevice;
use ferry_env::Env;
use ferry_fs::api::*;
use ferry_fs::{FsOptions, InProcess, LocalFs};
use std::sync::Arc;

pub(crate) fn mount(dev: &Arc<dyn BlockDevice>, read_only: bool) -> Arc<LocalFs> {
    let options =
        FsOptions { background: false, read_only, cache_bytes: 8 << 20, ..FsOptions::default() };
    LocalFs::open(dev.clone(), options, Env::real()).unwrap()
}

pub(crate) fn make_file(fs: &Arc<LocalFs>, dir: Ino, name: &str, data: &[u8]) -> Ino {
    let me = InProcess::default();
    let (entry, opened) =
        me.call(|cx| fs.create(cx, dir, name.as_bytes(), 0o644, libc::O_RDWR)).unwrap();
    let ino = entry.attr.unwrap().ino;
    let mut at = 0;
    while at < data.len() {
        at += me
            .call(|cx| fs.write(cx, ino, opened.fh, at as u64, &data[at..], false, false))
            .unwrap() as usize;
    }
    me.call(|cx| fs.fsync(cx, ino, opened.fh, false)).unwrap();
    me.call(|cx| {
        fs.release(cx, ino, opened.fh);
        Ok(())
    })
    .unwrap();
    fs.forget(ino, 1);
    ino
}

pub(crate) fn make_dir(fs: &Arc<LocalFs>, dir: Ino, name: &str) -> Ino {
    let entry = InProcess::default().call(|cx| fs.mkdir(cx, dir, name.as_bytes(), 0o755)).unwrap();
    let ino = entry.attr.unwrap().ino;
    fs.forget(ino, 1);
    ino
}
