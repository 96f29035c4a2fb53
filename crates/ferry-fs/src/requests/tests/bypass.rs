//! Who bypasses the kernel's page cache, and who is known to have mapped a file nevertheless.

use crate::requests::tests::*;

fn create(w: &World, name: &str, flags: i32) -> (Ino, Opened) {
    let (entry, opened) =
        w.me.call(|cx| w.fs.create(cx, ROOT, name.as_bytes(), libc::S_IFREG | 0o644, flags))
            .unwrap();
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
    let (ino, maker) = create(&w, "f", libc::O_WRONLY);
    assert!(maker.direct_io && !maker.keep_cache);
    let reader = open(&w, ino, libc::O_RDONLY);
    let writer = open(&w, ino, libc::O_RDWR);
    assert!(reader.direct_io && writer.direct_io);

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

    let options =
        FsOptions { background: false, cache: CacheMode::Writeback, ..FsOptions::default() };
    let w = World::with(options);
    let (ino, cached) = create(&w, "f", libc::O_WRONLY);
    assert!(!cached.direct_io, "the write-back cache takes every write");
    let seek = w.me.call(|cx| w.fs.lseek(cx, ino, cached.fh, 0, libc::SEEK_DATA));
    assert_eq!(code(seek), libc::ENOSYS, "what it holds back is no hole");
}

#[test]
fn pages_that_are_read_past_the_cache_are_known_to_who_writes_past_it() {
    let read =
        |w: &World, ino, fh| w.me.call(|cx| w.fs.read_pages(cx, ino, fh, 0, &mut [0; 10])).unwrap();
    let w = World::new();
    let (ino, maker) = create(&w, "f", libc::O_WRONLY);
    let (other, others) = create(&w, "g", libc::O_WRONLY);
    let mapper = open(&w, ino, libc::O_RDWR);
    w.me.call(|cx| w.fs.read(cx, ino, mapper.fh, 0, &mut [0; 10])).unwrap();
    assert!(!w.fs.keeps_pages(ino, maker.fh), "a read past the cache leaves no page");
    read(&w, ino, mapper.fh);
    assert!(w.fs.keeps_pages(ino, maker.fh) && w.fs.keeps_pages(ino, mapper.fh));
    assert!(!w.fs.keeps_pages(other, others.fh));

    let (cached, both) = create(&w, "h", libc::O_RDWR);
    read(&w, cached, both.fh);
    assert!(!w.fs.keeps_pages(cached, both.fh), "what goes through the cache is never behind it");

    let w = World::with(FsOptions {
        background: false,
        cache: CacheMode::Strict,
        ..FsOptions::default()
    });
    let (ino, both) = create(&w, "f", libc::O_RDWR);
    assert!(!w.fs.keeps_pages(ino, both.fh));
    read(&w, ino, both.fh);
    assert!(w.fs.keeps_pages(ino, both.fh));
}
