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
fn a_write_only_maker_and_later_opens_bypass_the_cache() {
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
fn readers_and_opens_of_existing_files_use_the_cache() {
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
fn a_bypassing_writer_sees_that_pages_were_read() {
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
    assert!(w.fs.keeps_pages(cached, both.fh), "a direct write of it is behind the cache");

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

#[test]
fn a_direct_writer_bypasses_the_cache_if_nobody_else_has_the_file_open() {
    let w = World::new();
    let (ino, maker) = create(&w, "f", libc::O_RDWR);
    let beside = open(&w, ino, libc::O_RDWR | libc::O_DIRECT);
    assert!(!beside.direct_io && beside.keep_cache, "the maker's handle caches");
    assert!(w.fs.keeps_pages(ino, beside.fh));
    release(&w, ino, maker);
    release(&w, ino, beside);

    let alone = open(&w, ino, libc::O_WRONLY | libc::O_DIRECT);
    assert!(alone.direct_io && !alone.keep_cache, "the kernel drops its pages");
    assert!(!w.fs.keeps_pages(ino, alone.fh));
    assert!(open(&w, ino, libc::O_RDONLY).direct_io, "others bypass with it");
    release(&w, ino, alone);
    assert!(!open(&w, ino, libc::O_RDONLY).direct_io);
}

#[test]
fn a_direct_reader_bypasses_the_cache_alone() {
    let w = World::new();
    let (ino, cached) = create(&w, "f", libc::O_RDWR);
    let direct = open(&w, ino, libc::O_RDONLY | libc::O_DIRECT);
    assert!(direct.direct_io && !cached.direct_io);
    assert!(!open(&w, ino, libc::O_RDWR).direct_io, "a reader that bypasses harms nobody");

    let w = World::with(FsOptions {
        background: false,
        cache: CacheMode::Writeback,
        ..FsOptions::default()
    });
    let (ino, both) = create(&w, "f", libc::O_RDWR | libc::O_DIRECT);
    assert!(
        !both.direct_io && !w.fs.keeps_pages(ino, both.fh),
        "its direct writes are synchronous"
    );
}
