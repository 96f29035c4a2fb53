//! Random changes of contents, and kills between them: all that was answered is there.

use crate::requests::tests::carried::{killed_and, mortal};
use crate::requests::tests::*;
use crate::store::data_store::{Busy, Dirty};
use proptest::collection::vec;
use proptest::prelude::*;

const FILES: usize = 3;

#[derive(Clone, Debug)]
enum Op {
    Write(u64, usize),
    Resize(usize),
    Punch(u64, u64),
    Time(i64),
    WriteBack,
    Sync,
    SyncAll,
    /// The name is removed, perhaps while the file is open, and another file gets it.
    Replace(bool),
    Kill,
}

fn op() -> impl Strategy<Value = (usize, Op)> {
    let at = || prop_oneof![0..5000_u64, 0..200_000_u64];
    let kind = prop_oneof![
        8 => (at(), prop_oneof![1..200_usize, 1..90_000_usize]).prop_map(|(at, len)| Op::Write(at, len)),
        3 => at().prop_map(|size| Op::Resize(size as usize)),
        2 => (at(), 1..70_000_u64).prop_map(|(at, len)| Op::Punch(at, len)),
        2 => (1..1_000_i64).prop_map(Op::Time),
        3 => Just(Op::WriteBack),
        1 => Just(Op::Sync),
        1 => Just(Op::SyncAll),
        1 => any::<bool>().prop_map(Op::Replace),
        3 => Just(Op::Kill),
    ];
    (0..FILES, kind)
}

struct File {
    ino: Ino,
    fh: u64,
    bytes: Vec<u8>,
    mtime: Timestamp,
    /// Removed, and open.
    is_nameless: bool,
}

fn create(world: &World, number: usize) -> File {
    let (ino, fh) = world.create(ROOT, &number.to_string()).unwrap();
    File { ino, fh, bytes: Vec::new(), mtime: world.attr(ino).mtime, is_nameless: false }
}

fn check(world: &World, files: &[File]) {
    for (number, file) in files.iter().enumerate() {
        let attr = world.attr(file.ino);
        assert_eq!(attr.size, file.bytes.len() as u64, "{number}");
        assert_eq!(attr.mtime, file.mtime, "{number}");
        let found = world.read(file.ino, file.fh, file.bytes.len() + 1).unwrap();
        let wrong = found.iter().zip(&file.bytes).position(|(a, b)| a != b);
        assert_eq!((found.len(), wrong), (file.bytes.len(), None), "{number}");
    }
}

fn change(world: &World, file: &mut File, number: u8, op: &Op) {
    match *op {
        Op::Write(at, len) => {
            let (from, to) = (at as usize, at as usize + len);
            world.write(file.ino, file.fh, at, &vec![number; len]).unwrap();
            file.bytes.resize(file.bytes.len().max(to), 0);
            file.bytes[from..to].fill(number);
        }
        Op::Resize(size) => {
            world.set(file.ino, SetAttr { size: Some(size as u64), ..SetAttr::default() }).unwrap();
            file.bytes.resize(size, 0);
        }
        Op::Punch(at, len) => {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            let (ino, fh) = (file.ino, file.fh);
            world.me.call(|cx| world.fs.fallocate(cx, ino, fh, mode, at, len)).unwrap();
            let size = file.bytes.len();
            let to = at as usize + len as usize;
            file.bytes[(at as usize).min(size)..to.min(size)].fill(0);
        }
        Op::Time(time) => {
            let mtime = Some(SetTime::At(Timestamp(time.into())));
            world.set(file.ino, SetAttr { mtime, ..SetAttr::default() }).unwrap();
        }
        _ => unreachable!("not a change of contents"),
    }
    file.mtime = world.attr(file.ino).mtime;
}

#[test]
fn contents_that_write_back_is_about_to_log_survive_a_kill() {
    for len in [1500, 300_000] {
        let (mut world, mut memory) = mortal(FsOptions::default());
        let mut file = create(&world, 0);
        for version in 1..3 {
            change(&world, &mut file, version, &Op::Write(0, len));
            if version == 1 {
                world.fs.sync().unwrap();
            }
        }
        // Neither comes back: they end with the process.
        let fs: &'static Arc<LocalFs> = Box::leak(Box::new(Arc::clone(&world.fs)));
        std::mem::forget(fs.data.table.joining.lock());
        let inode = fs.table.need(file.ino).unwrap();
        let writes = Arc::clone(&inode);
        std::thread::spawn(move || fs.data.write_back(Dirty::File(&writes), Busy::Wait));
        while inode.state.try_share().is_some() {
            std::thread::yield_now();
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        killed_and(&mut world, &mut memory, |left| left);
        check(&world, &[file]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn contents_sizes_and_times_that_were_answered_survive_kills(
        ops in vec(op(), 1..60),
        cache_bytes in prop_oneof![Just(64_usize << 20), Just(3_usize << 20)],
    ) {
        let (mut world, mut file) = mortal(FsOptions { cache_bytes, ..FsOptions::default() });
        let mut files: Vec<File> = (0..FILES).map(|number| create(&world, number)).collect();
        for (number, (which, op)) in (1..).zip(&ops) {
            match op {
                Op::WriteBack => {
                    let inode = world.fs.table.need(files[*which].ino).unwrap();
                    world.fs.data.write_back(Dirty::File(&inode), Busy::Wait).unwrap();
                }
                Op::Sync => {
                    let (ino, fh) = (files[*which].ino, files[*which].fh);
                    world.me.call(|cx| world.fs.fsync(cx, ino, fh, false)).unwrap();
                }
                Op::SyncAll => world.fs.sync().unwrap(),
                Op::Replace(stays_open) => {
                    let old = &mut files[*which];
                    world.unlink(ROOT, &which.to_string()).unwrap();
                    if !stays_open {
                        world.release(old.ino, old.fh);
                    }
                    old.is_nameless = true;
                    let new = create(&world, *which);
                    let old = std::mem::replace(&mut files[*which], new);
                    if *stays_open {
                        files.push(old);
                    }
                }
                Op::Kill => {
                    killed_and(&mut world, &mut file, |left| left);
                    check(&world, &files);
                }
                change_of_contents => {
                    change(&world, &mut files[*which], number, change_of_contents);
                }
            }
        }
        killed_and(&mut world, &mut file, |left| left);
        check(&world, &files);
        files.iter().filter(|file| file.is_nameless).for_each(|file| world.release(file.ino, file.fh));
        world.check();
    }
}
