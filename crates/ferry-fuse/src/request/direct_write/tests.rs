use super::*;

/// A file and its mapping: the kernel and the file system in one.
#[derive(Default)]
struct MappedFile {
    /// The contents that the file system holds.
    bytes: Mutex<Vec<u8>>,
    mapped: Mutex<bool>,
    /// The first write also maps the file, as a program may do meanwhile.
    maps_at_write: bool,
    parks: bool,
    held: Mutex<Vec<(usize, Vec<u8>, Complete)>>,
    dropping: Mutex<Vec<Box<dyn FnOnce() + Send>>>,
    fails: bool,
}

impl WriteTarget for MappedFile {
    fn keeps_pages(&self, _ino: Ino, _fh: u64) -> bool {
        *self.mapped.lock()
    }

    fn write(&self, cx: &Cx<'_>, write: DirectWriteArgs, data: &[u8]) -> Answer<u64> {
        assert_eq!(cx.request(), Some(REQUEST), "if it is replayed, it is made once");
        if self.fails {
            return Err(Stop::Errno(Errno(libc::ENOSPC)));
        }
        if self.maps_at_write {
            *self.mapped.lock() = true;
        }
        let at = if write.append { self.bytes.lock().len() } else { write.offset as usize };
        if self.parks {
            self.held.lock().push((at, data.to_vec(), cx.park.park(None)));
            return Err(Stop::Parked);
        }
        self.put(at, data);
        Ok(data.len() as u64)
    }
}

impl DropPages for MappedFile {
    fn drop_pages(&self, _ino: Ino, _offset: u64, _len: u64, done: Box<dyn FnOnce() + Send>) {
        self.dropping.lock().push(done);
    }
}

impl MappedFile {
    fn put(&self, at: usize, data: &[u8]) {
        let mut bytes = self.bytes.lock();
        let len = bytes.len().max(at + data.len());
        bytes.resize(len, 0);
        bytes[at..at + data.len()].copy_from_slice(data);
    }

    /// The kernel has dropped its pages, for the oldest such request.
    fn dropped(&self) {
        let done = self.dropping.lock().remove(0);
        done();
    }

    fn complete(&self) {
        let (at, data, complete) = self.held.lock().remove(0);
        self.put(at, &data);
        complete(Ok(Reply::Count(data.len() as u64)));
    }
}

/// What each write is for.
const REQUEST: ferry_fs::RequestId = ferry_fs::RequestId { slot: 3, unique: 5 };

#[derive(Clone, Default)]
struct TestPark(Arc<Mutex<Vec<Result<Reply, Errno>>>>);

impl Park for TestPark {
    fn park(&self, _interrupt: Option<Interrupt>) -> Complete {
        let answers = self.0.clone();
        Box::new(move |answer| answers.lock().push(answer))
    }

    fn request(&self) -> Option<ferry_fs::RequestId> {
        Some(REQUEST)
    }
}

const INO: Ino = 7;

struct Test {
    file: Arc<MappedFile>,
    direct_writes: Arc<DirectWrites>,
    park: TestPark,
}

impl Test {
    fn new(file: MappedFile) -> Self {
        *file.bytes.lock() = vec![b'.'; 8];
        let file = Arc::new(file);
        let direct_writes = DirectWrites::new(file.clone(), file.clone());
        Self { file, direct_writes, park: TestPark::default() }
    }

    fn mapped() -> Self {
        Self::new(MappedFile { mapped: Mutex::new(true), ..MappedFile::default() })
    }

    fn write(&self, offset: u64, append: bool, data: &[u8]) -> Answer<u64> {
        let cx = Cx { uid: 0, gid: 0, pid: 0, umask: 0, park: &self.park };
        self.direct_writes.write(
            &cx,
            DirectWriteArgs { ino: INO, fh: 1, offset, append, kill_suidgid: false },
            data,
        )
    }

    /// The kernel writes back a page that it read before.
    fn write_back(&self, page: &[u8]) {
        let data = self.direct_writes.written_back(INO, 0, page);
        self.file.put(0, &data);
    }

    fn text(&self) -> String {
        String::from_utf8(self.file.bytes.lock().clone()).expect("text")
    }

    fn answered(&self) -> Option<Result<Reply, Errno>> {
        self.park.0.lock().pop()
    }
}

#[test]
fn a_file_that_is_not_mapped_is_written_at_once() {
    let t = Test::new(MappedFile::default());
    assert_eq!(t.write(2, false, b"ab").expect("written"), 2);
    assert_eq!(t.text(), "..ab....");
    assert!(t.file.dropping.lock().is_empty());
}

#[test]
fn a_stale_page_never_undoes_a_write_whenever_it_is_written_back() {
    for back_at in 0..3 {
        let t = Test::mapped();
        assert!(matches!(t.write(2, false, b"ab"), Err(Stop::Parked)));
        for step in 0..3 {
            if step == back_at {
                t.write_back(b".......S");
            }
            if step < 2 {
                assert!(t.answered().is_none(), "a page may be older than the write");
                t.file.dropped();
            }
        }
        assert!(matches!(t.answered(), Some(Ok(Reply::Count(2)))));
        if back_at < 2 {
            assert_eq!(t.text(), "..ab...S", "written back at {back_at}");
        }
        assert_eq!(t.direct_writes.count.load(Ordering::SeqCst), 0);
        assert!(t.direct_writes.overlays.lock().all.is_empty());
    }
}

#[test]
fn a_store_over_bytes_read_after_the_write_stays() {
    let t = Test::mapped();
    assert!(t.write(2, false, b"abc").is_err());
    t.direct_writes.reads(INO, 0, 8);
    t.write_back(b".......S");
    assert_eq!(t.text(), "..abc..S", "the page was read before the write was made");
    t.file.dropped();
    t.direct_writes.reads(INO, 0, 4);
    t.write_back(b"..AB...S");
    assert_eq!(t.text(), "..ABc..S", "half of the page was read behind it");
    t.file.dropped();
    assert!(t.answered().is_some());
}

#[test]
fn a_write_is_repeated_if_the_file_is_mapped_meanwhile_but_an_append_is_not() {
    for (append, parks) in [(false, false), (false, true), (true, false), (true, true)] {
        let t = Test::new(MappedFile { maps_at_write: true, parks, ..MappedFile::default() });
        assert!(matches!(t.write(8, append, b"ab"), Err(Stop::Parked)));
        if parks {
            t.file.complete();
        }
        if !append {
            // A stale page is written back over the write before the mapping is known.
            t.file.put(0, b".......S..");
            t.file.dropped();
            if parks {
                t.file.complete();
            }
        }
        assert!(t.answered().is_none());
        t.file.dropped();
        assert!(matches!(t.answered(), Some(Ok(Reply::Count(2)))));
        assert_eq!(t.text(), if append { "........ab" } else { ".......Sab" });
    }
}

#[test]
fn a_failed_write_is_answered_and_leaves_no_overlay() {
    let t =
        Test::new(MappedFile { mapped: Mutex::new(true), fails: true, ..MappedFile::default() });
    assert!(t.write(2, false, b"ab").is_err());
    t.file.dropped();
    assert!(matches!(t.answered(), Some(Err(Errno(libc::ENOSPC)))));
    t.write_back(b".......S");
    assert_eq!(t.text(), ".......S");
}

#[test]
fn writes_beyond_the_limit_do_not_wait_for_pages() {
    let t = Test::mapped();
    for _ in 0..WAITING_MAX {
        assert!(t.write(2, false, b"ab").is_err());
        assert!(t.answered().is_none());
    }
    assert!(t.write(4, false, b"cd").is_err());
    assert!(matches!(t.answered(), Some(Ok(Reply::Count(2)))));
    t.write_back(b".......S");
    assert_eq!(t.text(), "..abcd.S", "and stale pages do not undo it either");
}

#[test]
fn the_parts_outside_the_excluded_ranges_are_left() {
    assert_eq!(without(0..10, &[2..4, 3..6, 20..30]), [0..2, 6..10]);
    assert_eq!(without(5..5, &[]), []);
    assert_eq!(without(0..10, std::slice::from_ref(&(0..10))), []);
}
