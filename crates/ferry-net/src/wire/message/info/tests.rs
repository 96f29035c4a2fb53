use super::super::{Claim, Forgotten, Numbers, Purpose};
use super::*;
use crate::codec::{Input, List, Wire};
use ferry_fs::{FileLock, RenameFlags, SetAttr, XattrFlags};

const LOCK: FileLock = FileLock { start: 0, end: 0, kind: 0, pid: 0, owner: 0, flock: false };

fn name(text: &str) -> Vec<u8> {
    text.into()
}

fn open(flags: i32, kill_suidgid: bool) -> Op {
    Op::Open { ino: 1, fh: 7, flags, kill_suidgid }
}

fn rename(exchange: bool, whiteout: bool) -> Op {
    let flags = RenameFlags { exchange, whiteout, ..RenameFlags::default() };
    Op::Rename { parent: 1, name: name("a"), new_parent: 2, new_name: name("b"), flags }
}

fn setattr(size: Option<u64>) -> Op {
    Op::Setattr { ino: 1, fh: Some(7), set: SetAttr { size, mode: Some(0), ..SetAttr::default() } }
}

fn write(append: bool) -> Op {
    Op::Write { fh: 7, offset: 0, data: vec![0; 5000], append, kill_suidgid: false }
}

/// Operations of every kind; several of a kind, where its fields change the facts.
fn samples() -> Vec<Op> {
    vec![
        Op::Lookup { parent: 1, name: name("a") },
        Op::Getattr { ino: 1 },
        Op::Readlink { ino: 1 },
        Op::Read { fh: 7, offset: 0, size: 9000 },
        Op::Fsync { fh: 7, data_only: false },
        Op::Lseek { fh: 7, offset: 0, whence: 0 },
        Op::Readdir { ino: 1, cookie: 0 },
        Op::Fsyncdir { ino: 1, data_only: false },
        Op::Statfs {},
        Op::Getxattr { ino: 1, name: name("a") },
        Op::Listxattr { ino: 1 },
        Op::Getlk { ino: 1, lock: LOCK },
        Op::Lock { ino: 1, lock: LOCK, wait: true },
        Op::Sync {},
        Op::Stats {},
        Op::Lease { inodes: List(vec![1, 2, 3]) },
        Op::Numbers {},
        Op::Reserve { bytes: 1, inodes: 1 },
        Op::Walk {
            dirs: List(vec![DirName { parent: 1, name: name("a") }]),
            purpose: Purpose::List {},
        },
        Op::Settled {},
        setattr(None),
        setattr(Some(0)),
        Op::Mknod { parent: 1, name: name("a"), mode: 0, rdev: 0 },
        Op::Mkdir { parent: 1, name: name("a"), mode: 0 },
        Op::Symlink { parent: 1, name: name("a"), target: vec![b'x'; 3000] },
        Op::Link { ino: 1, parent: 2, name: name("a") },
        Op::Unlink { parent: 1, name: name("a") },
        Op::Rmdir { parent: 1, name: name("a") },
        rename(false, false),
        rename(false, true),
        rename(true, false),
        open(libc::O_RDONLY, false),
        open(libc::O_RDONLY, true),
        open(libc::O_RDWR, false),
        open(libc::O_RDONLY | libc::O_TRUNC, false),
        open(libc::O_WRONLY | libc::O_TRUNC, true),
        Op::Create { parent: 1, name: name("a"), mode: 0, flags: 0, fh: 7 },
        Op::Tmpfile { parent: 1, mode: 0, flags: 0, fh: 7 },
        write(false),
        write(true),
        Op::Release { fh: 7 },
        Op::Fallocate { fh: 7, mode: 0, offset: 0, len: 1 },
        Op::Copy { fh_in: 7, off_in: 0, fh_out: 8, off_out: 0, len: 1 },
        Op::Setxattr { ino: 1, name: name("a"), value: vec![0], flags: XattrFlags::default() },
        Op::Removexattr { ino: 1, name: name("a") },
        Op::Unlock { ino: 1, lock: LOCK },
        Op::Forget { inodes: List(vec![Forgotten { ino: 1, stamp: 1 }]) },
        Op::Claim { inodes: List(vec![Claim { ino: 1, capability: 1 }]) },
        Op::Nothing {},
        Op::Reclaim { ino: 1, lock: LOCK },
        Op::Numbered {
            numbers: Numbers { first: 1, count: 1, capability: 1 },
            made: List(vec![1]),
        },
        Op::Replayed {},
        Op::Remaining { bytes: 1, inodes: 1 },
    ]
}

/// The facts of an operation in a line. It leaves out those that say "no" or "nothing".
fn line(op: &Op) -> String {
    let info = op.info();
    let fields = format!("{op:?}");
    let kind = fields.split(' ').next().unwrap_or_default();
    let mut words = vec![format!("{kind}, {}:", info.what)];
    let mut add = |word: String, is: bool| words.extend(is.then_some(word));
    match info.stream {
        Stream::Changes => add("change".into(), true),
        Stream::Requests(behind) => add(format!("behind-{behind:?}"), true),
    }
    let inodes: Vec<Ino> = info.inodes().collect();
    add(format!("{:?}{inodes:?}", info.uses), !inodes.is_empty());
    add(format!("from-{:?}", info.from.unwrap_or(0)), info.from.is_some());
    add(format!("to-{:?}", info.to.unwrap_or(0)), info.to.is_some());
    add(format!("opens-{:?}", info.opens.unwrap_or(0)), info.opens.is_some());
    for (dir, name) in info.names() {
        add(format!("{dir}/{}", String::from_utf8_lossy(name)), true);
    }
    add(format!("{:?}", info.naming), info.naming != Naming::Nothing);
    add(format!("makes-{:?}", info.makes), info.makes != Makes::Nothing);
    add(format!("{:?}-{:?}", info.effect, info.replay), info.effect != Effect::Nothing);
    add("early".into(), info.is_early);
    add("writable".into(), info.needs_writable);
    add(format!("checks-{:?}", info.check), info.check != Check::Nothing);
    let Cost { bytes, inodes, number } = info.cost;
    add(format!("costs-{bytes}-{inodes}"), info.cost != Cost::NOTHING);
    add("number".into(), number);
    add(format!("data-{}", info.data_bytes), info.data_bytes > 0);
    add(format!("answer-{}", info.answer_bytes_max), info.answer_bytes_max != ANSWER_MIN);
    add("shows".into(), info.shows);
    add("parks".into(), info.parks);
    add("restores".into(), info.restores);
    add("always-made".into(), info.is_always_made);
    add("not-awaited".into(), !info.is_awaited);
    words.join(" ")
}

/// A row for each of these operations.
const TABLE: [&str; 53] = [
    "Lookup, request: behind-Early Read[1] checks-Permission shows",
    "Getattr, request: behind-Inodes Read[1] shows",
    "Readlink, request: behind-Inodes Read[1] checks-Permission shows",
    "Read, request: behind-Inodes from-7 checks-OpenFile answer-9000 shows parks",
    "Fsync, request: behind-Inodes from-7 checks-OpenFile parks",
    "Lseek, request: behind-Inodes from-7 checks-OpenFile shows",
    "Readdir, request: behind-Inodes Read[1] checks-Permission answer-32768 shows",
    "Fsyncdir, request: behind-Inodes Read[1] checks-OpenFile parks",
    "Statfs, request: behind-All shows",
    "Getxattr, request: behind-Inodes Read[1] checks-Permission answer-65536 shows",
    "Listxattr, request: behind-Inodes Read[1] checks-Permission answer-65536 shows",
    "Getlk, request: behind-Inodes Known[1]",
    "Lock, request: behind-All Known[1] parks",
    "Sync, request: behind-All parks",
    "Stats, request: behind-Inodes parks",
    "Lease, request: behind-Inodes Known[1, 2, 3] answer-768 shows",
    "Numbers, request: behind-Inodes",
    "Reserve, request: behind-Remaining",
    "Walk, request: behind-All Known[1] checks-Permission answer-262144 shows",
    "Settled, request: behind-Inodes",
    "Setattr, attributes: change Written[1] Metadata-Again early writable checks-Permission",
    "Setattr, cut off: change Written[1] Contents-Again early writable checks-Permission costs-16384-0",
    "Mknod, make: change Written[1] 1/a Adds makes-File Metadata-Again early writable checks-Permission costs-0-1 number",
    "Mkdir, make: change Written[1] 1/a Adds makes-Directory Metadata-Again early writable checks-Permission costs-0-1 number",
    "Symlink, make: change Written[1] 1/a Adds makes-Symlink Metadata-Again early writable checks-Permission costs-12288-1 number",
    "Link, link: change Written[1, 2] 2/a Adds Metadata-Again early writable checks-Permission costs-0-1",
    "Unlink, remove: change Written[1] 1/a Removes Metadata-AgainOrDone early writable checks-Permission",
    "Rmdir, remove: change Written[1] 1/a RemovesDirectory Metadata-AgainOrDone early writable checks-Permission",
    "Rename, rename: change Written[1, 2] 1/a 2/b Moves Metadata-AgainOrDone early writable checks-Permission costs-0-1",
    "Rename, rename: change Written[1, 2] 1/a 2/b MovesLeavingWhiteout Metadata-AgainOrDone early writable checks-Permission costs-0-1",
    "Rename, rename: change Written[1, 2] 1/a 2/b Exchanges Metadata-AgainOrDone early writable checks-Permission costs-0-1",
    "Open, open: change Opened[1] opens-7 early checks-Permission restores",
    "Open, open: change Written[1] opens-7 Contents-Again early checks-Permission restores",
    "Open, open: change Opened[1] opens-7 early writable checks-Permission restores",
    "Open, cut off: change Written[1] opens-7 Contents-Again early writable checks-Permission costs-16384-0 restores",
    "Open, cut off: change Written[1] opens-7 Contents-Again early writable checks-Permission costs-16384-0 restores",
    "Create, make: change Written[1] opens-7 1/a AddsOrOpens makes-File Metadata-Again early writable checks-Permission costs-0-1 number",
    "Tmpfile, change: change Read[1] opens-7 makes-Nameless Metadata-Never writable checks-Permission costs-0-1 number",
    "Write, write: change to-7 Contents-Again early writable checks-OpenFile costs-20480-0 data-5000",
    "Write, write: change to-7 Contents-Never early writable checks-OpenFile costs-20480-0 data-5000",
    "Release, change: change restores always-made not-awaited",
    "Fallocate, write: change to-7 Contents-Again writable checks-OpenFile",
    "Copy, write: change from-7 to-8 Contents-Never writable checks-OpenFile",
    "Setxattr, extended attributes: change Written[1] Metadata-AgainOrDone writable checks-Permission",
    "Removexattr, extended attributes: change Written[1] Metadata-AgainOrDone writable checks-Permission",
    "Unlock, change: change Known[1] always-made",
    "Forget, change: change restores always-made not-awaited",
    "Claim, change: change restores",
    "Nothing, change: change",
    "Reclaim, change: change Known[1] restores always-made",
    "Numbered, change: change restores",
    "Replayed, change: change restores",
    "Remaining, change: change not-awaited",
];

#[test]
fn facts_of_every_operation_are_pinned() {
    let lines: Vec<String> = samples().iter().map(line).collect();
    assert_eq!(lines, TABLE);
}

/// A tag and zeros decode to an operation of nearly every kind. `Walk` needs a purpose behind its
/// empty list.
#[test]
fn every_operation_that_the_codec_knows_is_in_the_table() {
    let mut sampled = [false; 256];
    for op in samples() {
        let mut bytes = Vec::new();
        op.put(&mut bytes);
        sampled[usize::from(bytes[0])] = true;
    }
    for tag in 0..=u8::MAX {
        let decodes = |purpose| {
            let mut bytes = vec![0; 1024];
            (bytes[0], bytes[5]) = (tag, purpose);
            Op::get(&mut Input::new(&bytes)).is_ok()
        };
        assert_eq!(decodes(0) || decodes(1), sampled[usize::from(tag)], "operation {tag}");
    }
}
