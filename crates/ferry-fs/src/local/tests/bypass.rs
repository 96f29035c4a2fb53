//! Who bypasses the kernel's page cache, and who is told.

use super::*;
use parking_lot::Mutex;

#[derive(Default)]
struct Told(Mutex<Vec<(Ino, u64, u64)>>);

impl Host for Told {
    fn invalidate_inode(&self, ino: Ino, offset: u64, len: u64) {
        self.0.lock().push((ino, offset, len));
    }
    fn invalidate_attributes(&self, _ino: Ino) {}
    fn invalidate_entry(&self, _parent: Ino, _name: &[u8]) {}
    fn forget(&self, _what: ToForget, done: Box<dyn FnOnce() + Send>) {
        done();
    }
    fn forgets_names(&self) -> bool {
        false
    }
    fn stats(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

fn create(w: &World, name: &str, flags: i32) -> (Ino, Opened) {
    let (entry, opened) =
        w.me.call(|cx| w.fs.create(cx, ROOT, name.as_bytes(), libc::S_IFREG | 0o644, flags)).unwrap();
    (entry.attr.unwrap().ino, opened)
}

fn open(w: &World, ino: Ino, flags: i32) -> Opened {
    w.me.call(|cx| w.fs.open(cx, ino, flags, false)).unwrap()
}

fn release(w: &World, ino: Ino, opened: Opened) {
    w.me.call(|cx| {
        w.fs.release(cx, ino, opened.fh);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_maker_that_only_writes_bypasses_and_so_does_who_joins_it() {
    let w = World::new();
    let told = Arc::new(Told::default());
    w.fs.attach(told.clone());
    let (ino, maker) = create(&w, "f", libc::O_WRONLY);
    assert!(maker.direct_io && !maker.keep_cache);
    w.me.call(|cx| w.fs.write(cx, ino, maker.fh, 0, b"alone", false, false)).unwrap();
    assert!(told.0.lock().is_empty(), "nobody else has it open");

    let reader = open(&w, ino, libc::O_RDONLY);
    let writer = open(&w, ino, libc::O_RDWR);
    assert!(reader.direct_io && writer.direct_io);
    w.me.call(|cx| w.fs.write(cx, ino, maker.fh, 5, b", not any more", false, false)).unwrap();
    assert_eq!(*told.0.lock(), [(ino, 5, 14)]);

    release(&w, ino, maker);
    assert!(open(&w, ino, libc::O_RDONLY).direct_io, "the other writer still bypasses");
    release(&w, ino, writer);
    let cached = open(&w, ino, libc::O_WRONLY);
    assert!(!cached.direct_io && cached.keep_cache, "a reader that bypasses harms nobody");
}

#[test]
fn who_may_read_or_finds_the_file_there_caches() {
    let w = World::new();
    let (ino, both) = create(&w, "f", libc::O_RDWR);
    assert!(!both.direct_io);
    let (same, again) = create(&w, "f", libc::O_WRONLY);
    assert_eq!(same, ino);
    assert!(!again.direct_io, "the first handle caches");
    assert!(!open(&w, ino, libc::O_RDONLY).direct_io);

    let options = FsOptions { background: false, cache: CacheMode::Writeback, ..FsOptions::default() };
    let w = World::with(options);
    assert!(!create(&w, "f", libc::O_WRONLY).1.direct_io, "the write-back cache takes every write");
}
