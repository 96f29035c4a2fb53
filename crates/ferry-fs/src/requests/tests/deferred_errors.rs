//! Who hears of a write of the kernel's cache that failed.

use crate::requests::tests::*;
use parking_lot::Mutex;

#[derive(Default)]
struct Told(Mutex<Vec<Ino>>);

impl Host for Told {
    fn invalidate_attributes(&self, ino: Ino) {
        self.0.lock().push(ino);
    }
    fn forget(&self, _what: ToForget, done: Box<dyn FnOnce() + Send>) {
        done();
    }
    fn forget_contents(&self, _files: Vec<Ino>, done: Box<dyn FnOnce() + Send>) {
        done();
    }
    fn forget_all(&self, _known: Vec<Ino>, done: Box<dyn FnOnce() + Send>) {
        done();
    }
    fn forgets_names(&self) -> bool {
        false
    }
    fn stats(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}

fn world(cache: CacheMode) -> (World, Arc<Told>) {
    let w = World::with(FsOptions { background: false, cache, ..FsOptions::default() });
    let told = Arc::new(Told::default());
    w.fs.attach(told.clone());
    (w, told)
}

/// Writes to the file until there is no room.
fn fill(w: &World, ino: Ino, fh: u64) {
    let chunk = vec![7; 1 << 20];
    let mut at = 0;
    let full = loop {
        match w.write(ino, fh, at, &chunk) {
            Ok(n) => at += n,
            Err(error) => break error,
        }
    };
    assert_eq!(full, Errno(libc::ENOSPC));
}

#[test]
fn each_writing_descriptor_is_told_of_a_deferred_error_once() {
    let (w, told) = world(CacheMode::Writeback);
    let (ino, first) = w.create(ROOT, "f").unwrap();
    let second = w.open(ino).unwrap();
    let reader = w.me.call(|cx| w.fs.open(cx, ino, libc::O_RDONLY, false)).unwrap().fh;
    let ask = |fh| w.me.call(|cx| w.fs.getattr(cx, ino, fh)).map(drop);
    ask(Some(first)).unwrap();
    fill(&w, ino, first);
    assert_eq!(*told.0.lock(), [ino], "the kernel must ask again");
    for fh in [None, Some(reader)] {
        ask(fh).unwrap();
    }
    for fh in [first, second] {
        assert_eq!(ask(Some(fh)), Err(Errno(libc::ENOSPC)));
        ask(Some(fh)).unwrap();
    }
    let last = w.open(ino).unwrap();
    ask(Some(last)).unwrap();
    // The next failure is another one.
    fill(&w, ino, first);
    for fh in [first, second, last] {
        assert_eq!(ask(Some(fh)), Err(Errno(libc::ENOSPC)));
    }
    for fh in [first, second, reader, last] {
        w.release(ino, fh);
    }
}

#[test]
fn an_error_told_by_a_write_is_not_told_again() {
    let (w, told) = world(CacheMode::Kernel);
    let (ino, fh) = w.create(ROOT, "f").unwrap();
    fill(&w, ino, fh);
    w.me.call(|cx| w.fs.getattr(cx, ino, Some(fh))).unwrap();
    assert!(told.0.lock().is_empty());
    w.release(ino, fh);
}
