//! Real mounts, on each transport.

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use common::{Mounted, on_each_transport, until};
use ferry_fs::ToForget;
use ferry_fuse::{Error, Transport, Unmount};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CpuSet, gettid, sched_getaffinity, sched_setaffinity};

#[test]
fn files_of_all_sizes_come_back_as_they_were_written() {
    on_each_transport(|m| {
        for (i, size) in [0, 1, 4095, 4096, 131_073, 1 << 20, (3 << 20) + 7].into_iter().enumerate()
        {
            let bytes: Vec<u8> =
                (0..size).map(|n: usize| (n.wrapping_mul(31) >> 3) as u8).collect();
            let path = m.path(&format!("file{i}"));
            fs::write(&path, &bytes).expect("writes");
            assert!(fs::read(&path).expect("reads") == bytes, "{size} bytes");
            // Around the page cache, too.
            let direct = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_DIRECT)
                .open(&path)
                .expect("opens");
            let mut again = vec![0; size];
            direct.read_exact_at(&mut again, 0).expect("reads directly");
            assert!(again == bytes, "{size} bytes directly");
            assert_eq!(fs::metadata(&path).expect("stats").len(), size as u64);
        }
        m.end(Unmount::Normal);
    });
}

#[test]
fn names_and_attributes_work() {
    on_each_transport(|m| {
        fs::create_dir(m.path("d")).expect("mkdir");
        fs::write(m.path("d/a"), "a").expect("creates");
        symlink("a", m.path("d/s")).expect("symlink");
        fs::hard_link(m.path("d/a"), m.path("d/b")).expect("link");
        assert_eq!(fs::read_link(m.path("d/s")).expect("readlink"), std::path::Path::new("a"));
        assert_eq!(fs::metadata(m.path("d/b")).expect("stats").nlink(), 2);
        fs::rename(m.path("d/b"), m.path("c")).expect("rename");
        assert_eq!(fs::read(m.path("c")).expect("reads"), b"a");
        fs::set_permissions(m.path("c"), fs::Permissions::from_mode(0o640)).expect("chmod");
        assert_eq!(fs::metadata(m.path("d/s")).expect("follows").mode() & 0o7777, 0o640);
        let mut names: Vec<_> = fs::read_dir(m.path("d"))
            .expect("lists")
            .map(|e| e.expect("an entry").file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["a", "s"]);
        assert!(fs::remove_dir(m.path("d")).is_err(), "not empty");
        fs::remove_dir_all(m.path("d")).expect("removes");
        let long = "x".repeat(256);
        assert_eq!(
            File::create(m.path(&long)).expect_err("too long").raw_os_error(),
            Some(libc::ENAMETOOLONG)
        );
        m.end(Unmount::Normal);
    });
}

#[test]
fn a_large_directory_is_listed_once_each() {
    on_each_transport(|m| {
        for i in 0..2000 {
            File::create(m.path(&format!("{i:0>100}"))).expect("creates");
        }
        for _ in 0..2 {
            let mut listed: Vec<String> = fs::read_dir(m.dir.path())
                .expect("lists")
                .map(|e| e.expect("an entry"))
                .inspect(|e| assert!(e.metadata().expect("stats").is_file()))
                .map(|e| e.file_name().into_string().expect("digits"))
                .collect();
            listed.sort();
            assert!(listed.iter().enumerate().all(|(i, name)| *name == format!("{i:0>100}")));
            assert_eq!(listed.len(), 2000);
        }
        m.end(Unmount::Normal);
    });
}

#[test]
fn appending_truncating_seeking_and_allocating_work() {
    on_each_transport(|m| {
        let path = m.path("f");
        fs::write(&path, "0123456789").expect("writes");
        let mut append = OpenOptions::new().append(true).open(&path).expect("opens");
        append.write_all(b"abc").expect("appends");
        let mut file = OpenOptions::new().read(true).write(true).open(&path).expect("opens");
        file.set_len(4).expect("truncates");
        file.set_len(8).expect("extends");
        let mut text = Vec::new();
        file.read_to_end(&mut text).expect("reads");
        assert_eq!(text, b"0123\0\0\0\0");
        assert_eq!(file.seek(SeekFrom::End(-1)).expect("seeks"), 7);
        let truncated =
            OpenOptions::new().write(true).truncate(true).open(&path).expect("truncates");
        assert_eq!(truncated.metadata().expect("stats").len(), 0);
        let tmp = OpenOptions::new().write(true).custom_flags(libc::O_TMPFILE).open(m.dir.path());
        tmp.expect("a file without a name").write_all(b"x").expect("writes");
        drop((append, file, truncated));
        m.end(Unmount::Normal);
    });
}

/// Runs the calling thread on the first core that it may use.
fn on_first_core() {
    let allowed = sched_getaffinity(None).expect("Linux");
    let mut first = CpuSet::new();
    first.set((0..CpuSet::MAX_CPU).find(|core| allowed.is_set(*core)).expect("it runs somewhere"));
    sched_setaffinity(None, &first).expect("it is allowed");
}

/// A thread on the first core that calls fsync; this returns when it waits for the answer.
fn calling_fsync<'a>(scope: &'a Scope<'a, '_>, file: File) -> ScopedJoinHandle<'a, ()> {
    let (sender, number) = sync_channel(1);
    let thread = scope.spawn(move || {
        on_first_core();
        sender.send(gettid()).expect("somebody wants to know");
        file.sync_all().expect("it is answered");
    });
    let number = number.recv().expect("it says so").as_raw_nonzero();
    let waits = format!("{} ", libc::SYS_fsync);
    let calls =
        || fs::read_to_string(format!("/proc/self/task/{number}/syscall")).expect("it lives");
    while !calls().starts_with(&waits) {
        thread::yield_now();
    }
    thread
}

/// Starts a program that syncs a file, and waits until its request is parked.
fn syncing(m: &Mounted, number: usize) -> Child {
    let path = m.path(&format!("sync{number}"));
    fs::write(&path, "x").expect("writes");
    let before = m.waiting.0.lock().parked.len();
    let child = Command::new("sync").arg(&path).spawn().expect("coreutils are there");
    until(&m.waiting, |w| w.parked.len() > before);
    child
}

#[test]
fn a_process_that_waits_for_fsync_can_be_killed() {
    on_each_transport(|m| {
        let mut child = syncing(&m, 0);
        child.kill().expect("kills");
        child.wait().expect("it has died");
        until(&m.waiting, |w| w.interrupted == 1);
        // The late answer is dropped, and the mount goes on.
        let parked = m.waiting.0.lock().parked.pop().expect("it was parked");
        parked.complete(Ok(()));
        fs::write(m.path("after"), "x").expect("writes");
        m.end(Unmount::Normal);
    });
}

#[test]
fn a_parked_fsync_is_answered_from_another_thread() {
    on_each_transport(|m| {
        let mut child = syncing(&m, 0);
        let parked = m.waiting.0.lock().parked.pop().expect("it was parked");
        thread::spawn(move || parked.complete(Ok(()))).join().expect("completes");
        assert!(child.wait().expect("ends").success());
        let mut child = syncing(&m, 1);
        drop(m.waiting.0.lock().parked.pop().expect("it was parked"));
        assert!(!child.wait().expect("ends").success(), "a forgotten answer is an error");
        m.end(Unmount::Normal);
    });
}

#[test]
fn hundreds_of_parked_requests_leave_the_mount_usable() {
    const MANY: usize = 300;
    on_each_transport(|m| {
        let waiters: Vec<_> = (0..MANY)
            .map(|i| {
                let file = File::create(m.path(&format!("f{i}"))).expect("creates");
                thread::spawn(move || file.sync_all())
            })
            .collect();
        until(&m.waiting, |w| w.parked.len() == MANY);
        fs::write(m.path("meanwhile"), "x").expect("writes");
        assert_eq!(m.host().stats()["parked"], MANY);
        for parked in std::mem::take(&mut m.waiting.0.lock().parked) {
            parked.complete(Ok(()));
        }
        for waiter in waiters {
            waiter.join().expect("ends").expect("synced");
        }
        assert_eq!(m.waiting.0.lock().interrupted, 0);
        m.end(Unmount::Normal);
    });
}

/// Files that the kernel forgets while no other request is served, so that it forgets them at once.
fn forgotten_slowly(m: &Mounted) {
    let root = fs::metadata(m.dir.path()).expect("stats").ino();
    fs::create_dir(m.path("d")).expect("mkdir");
    let names: Vec<String> = (0..20).map(|i| format!("f{i}")).collect();
    for name in &names {
        fs::write(m.path(name), "x").expect("writes");
    }
    {
        let mut waiting = m.waiting.0.lock();
        (waiting.holds, waiting.holds_forget) = (true, true);
    }
    thread::scope(|scope| {
        scope.spawn(|| fs::metadata(m.path("d/held")).expect_err("it is not there"));
        until(&m.waiting, |w| w.held);
        let (sender, sent) = sync_channel(1);
        let names = names.iter().map(|name| (root, name.as_bytes().into())).collect();
        let what = ToForget { removed: names, ..ToForget::default() };
        m.host().forget(what, Box::new(move || sender.send(()).expect("somebody waits")));
        sent.recv().expect("the kernel has forgotten them");
        m.waiting.0.lock().holds = false;
        m.waiting.1.notify_all();
    });
    until(&m.waiting, |w| w.forgetting);
}

#[test]
fn requests_and_interrupts_do_not_wait_for_a_slow_forget() {
    for (transport, is_shared) in
        [(Transport::Device, false), (Transport::Device, true), (Transport::Auto, false)]
    {
        let m = Mounted::of(transport, is_shared);
        fs::write(m.path("sync0"), "x").expect("writes");
        forgotten_slowly(&m);
        fs::metadata(m.path("other")).expect_err("it is not there");
        let mut child = syncing(&m, 0);
        child.kill().expect("kills");
        child.wait().expect("it has died");
        until(&m.waiting, |w| w.interrupted == 1);
        m.waiting.0.lock().holds_forget = false;
        m.waiting.1.notify_all();
        m.waiting.0.lock().parked.pop().expect("it was parked").complete(Ok(()));
        m.end(Unmount::Normal);
    }
}

/// Requests that come while the thread of their core's queue is busy take all of its slots, and
/// more: the kernel queues those.
#[test]
fn a_burst_of_parked_requests_leaves_the_mount_usable() {
    const MANY: usize = 1800;
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).expect("it is allowed");
    on_each_transport(|m| {
        let files: Vec<_> =
            (0..MANY).map(|i| File::create(m.path(&format!("f{i}"))).expect("creates")).collect();
        m.waiting.0.lock().holds = true;
        thread::scope(|scope| {
            let held = scope.spawn(|| {
                on_first_core();
                fs::metadata(m.path("held")).expect_err("it is not there");
            });
            until(&m.waiting, |w| w.held);
            let calling: Vec<_> =
                files.into_iter().map(|file| calling_fsync(scope, file)).collect();
            m.waiting.0.lock().holds = false;
            m.waiting.1.notify_all();
            until(&m.waiting, |w| w.parked.len() == MANY);
            held.join().expect("ends");
            scope.spawn(|| {
                on_first_core();
                fs::write(m.path("meanwhile"), "x").expect("writes");
            });
            let parked = std::mem::take(&mut m.waiting.0.lock().parked);
            parked.into_iter().for_each(|parked| parked.complete(Ok(())));
            calling.into_iter().for_each(|caller| caller.join().expect("ends"));
        });
        assert_eq!(m.waiting.0.lock().interrupted, 0);
        m.end(Unmount::Normal);
    });
}

#[test]
fn forced_unmounting_ends_waiting_requests() {
    on_each_transport(|m| {
        let mut child = syncing(&m, 0);
        let waiting = std::sync::Arc::clone(&m.waiting);
        m.end(Unmount::Force);
        assert!(!child.wait().expect("ends").success());
        assert_eq!(waiting.0.lock().interrupted, 1);
        let parked = waiting.0.lock().parked.pop().expect("it was parked");
        parked.complete(Ok(()));
    });
}

#[test]
fn a_connection_is_ended_by_its_number_though_a_process_has_its_descriptor() {
    on_each_transport(|m| {
        let mut child = syncing(&m, 0);
        let waiting = std::sync::Arc::clone(&m.waiting);
        let number = ferry_fuse::connection(m.dir.path()).expect("a table").expect("it is in it");
        ferry_fuse::abort(number).expect("it ends");
        assert!(!child.wait().expect("ends").success());
        let parked = waiting.0.lock().parked.pop().expect("it was parked");
        parked.complete(Ok(()));
        m.end(Unmount::Lazy);
    });
}

#[test]
fn a_busy_mount_is_unmounted_lazily_only() {
    on_each_transport(|m| {
        let file = File::create(m.path("f")).expect("creates");
        let handle = m.session.as_ref().expect("mounted").handle();
        match handle.unmount(Unmount::Normal) {
            Err(Error::Unmount { error, .. }) => {
                assert_eq!(error.raw_os_error(), Some(libc::EBUSY))
            }
            Err(Error::Helper(_)) => {} // fusermount3 says so in words
            other => panic!("{other:?}"),
        }
        handle.unmount(Unmount::Lazy).expect("unmounts");
        (&file).write_all(b"still there").expect("an open file works on");
        drop(file);
        m.session.expect("mounted").wait();
        handle.unmount(Unmount::Normal).expect("nothing left to do");
    });
}

#[test]
fn dropping_the_session_unmounts() {
    on_each_transport(|mut m| {
        fs::write(m.path("f"), "x").expect("writes");
        drop(m.session.take());
        assert!(!m.path("f").exists());
    });
}

#[test]
fn invalidated_entries_are_looked_up_again() {
    on_each_transport(|m| {
        fs::write(m.path("f"), "x").expect("writes");
        let ino = fs::metadata(m.path("f")).expect("stats").ino();
        let asked = || m.waiting.0.lock().asked;
        let before = asked();
        fs::metadata(m.path("f")).expect("stats");
        assert_eq!(asked(), before, "cached for ever");
        m.host().invalidate_attributes(ino);
        // Sent in order by another thread: when the mount has seen it, stat asks.
        while asked() == before {
            fs::metadata(m.path("f")).expect("stats");
            thread::yield_now();
        }
        m.end(Unmount::Normal);
    });
}

/// Makes, writes, reads, and removes files until `enough`; how many.
fn work_on(m: &std::path::Path, name: &str, enough: &AtomicBool) -> usize {
    let mut files = 0;
    while !enough.load(Ordering::Relaxed) {
        let path = m.join(format!("{name}-{files}"));
        let bytes = vec![files as u8; 1 + files * 977 % 200_000];
        fs::write(&path, &bytes).expect("writes");
        assert!(fs::read(&path).expect("reads") == bytes, "{}", path.display());
        assert_eq!(fs::metadata(&path).expect("stats").len(), bytes.len() as u64);
        fs::remove_file(&path).expect("removes");
        files += 1;
    }
    files
}

#[test]
fn another_session_goes_on_under_load() {
    on_each_transport(|mut m| {
        let mut open = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(m.path("open"))
            .expect("creates");
        open.write_all(b"before").expect("writes");
        let (enough, dir) = (AtomicBool::new(false), m.dir.path().to_owned());
        thread::scope(|scope| {
            let worker = |name| {
                scope.spawn({
                    let (dir, enough) = (&dir, &enough);
                    move || work_on(dir, name, enough)
                })
            };
            let workers = ["a", "b", "c", "d"].map(worker);
            for _ in 0..100 {
                assert!(m.hand_over(Duration::from_secs(10), Some(&open)), "every request ends");
                open.write_all(b".").expect("writes");
            }
            enough.store(true, Ordering::Relaxed);
            for worker in workers {
                assert!(worker.join().expect("no error") > 0);
            }
        });
        let mut text = Vec::new();
        open.seek(SeekFrom::Start(0)).expect("seeks");
        open.read_to_end(&mut text).expect("reads");
        assert_eq!(text, ["before", &".".repeat(100)].concat().as_bytes());
        drop(open);
        m.end(Unmount::Normal);
    });
}

#[test]
fn a_mount_that_nobody_uses_goes_on() {
    on_each_transport(|mut m| {
        for _ in 0..20 {
            assert!(m.hand_over(Duration::from_secs(10), None));
        }
        fs::write(m.path("file"), "x").expect("writes");
        m.end(Unmount::Normal);
    });
}

#[test]
fn a_session_whose_requests_do_not_end_serves_on() {
    on_each_transport(|mut m| {
        let file = File::create(m.path("slow")).expect("creates");
        let waiting = std::sync::Arc::clone(&m.waiting);
        let (enough, dir) = (AtomicBool::new(false), m.dir.path().to_owned());
        thread::scope(|scope| {
            let caller = calling_fsync(scope, file);
            until(&waiting, |w| w.parked.len() == 1);
            let worker = scope.spawn(|| work_on(&dir, "worker", &enough));
            for _ in 0..5 {
                assert!(!m.hand_over(Duration::from_millis(20), None));
                fs::write(dir.join("file"), "x").expect("it is served on");
            }
            waiting.0.lock().parked.pop().expect("it waits").complete(Ok(()));
            caller.join().expect("it is answered");
            let open = File::open(dir.join("file")).expect("opens");
            assert!(m.hand_over(Duration::from_secs(10), Some(&open)));
            enough.store(true, Ordering::Relaxed);
            assert!(worker.join().expect("no error") > 0);
        });
        m.end(Unmount::Normal);
    });
}
