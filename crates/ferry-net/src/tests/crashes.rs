//! The connection, or the server, ends at each message of a history, one after the other.

use std::sync::atomic::AtomicBool;

use super::*;

/// What ends at the message.
#[derive(Clone, Copy, PartialEq)]
enum Ends {
    Connection,
    Server,
}

/// What a client did, and what it was told of it.
#[derive(Default)]
struct Told {
    /// Files that should be there: contents, and whether fsync has said that they are durable.
    files: std::collections::BTreeMap<String, (Vec<u8>, bool)>,
    /// All that files of these names have ever had in them.
    written: Vec<(String, Vec<u8>)>,
    /// Something has failed: of what was not synced nothing is known.
    failed: bool,
}

impl Told {
    /// `None`: it has failed, as it may while the server is away.
    fn of<T>(&mut self, done: Done<T>, ends: Ends, at: &str) -> Option<T> {
        match done {
            Ok(value) => Some(value),
            Err(Errno(libc::EIO)) if ends == Ends::Server => {
                self.failed = true;
                None
            }
            // What it builds on has failed, or is lost: then `ferry sync` says so.
            Err(Errno(libc::ENOENT | libc::EEXIST | libc::ESTALE)) if ends == Ends::Server => None,
            Err(error) => panic!("{at}: {error}"),
        }
    }
}

/// Creates, writes, renames, removes and creates again, with a sync here and there.
fn history(client: &Client, ends: Ends, at: &str) -> Told {
    let mut told = Told::default();
    let dir = loop {
        let _made = told.of(client.mkdir(ROOT, "d"), ends, at);
        let synced = told.of(client.sync(), ends, at).is_some();
        if let (true, Ok(Some(attr))) = (synced, client.lookup(ROOT, "d")) {
            break attr.ino;
        }
    };
    for i in 0..4 {
        let name = format!("f{}", i % 3);
        if i == 3 && told.of(client.unlink(dir, &name), ends, at).is_some() {
            told.files.remove(&name);
        }
        let Some((ino, fh)) = told.of(client.create(dir, &name), ends, at) else {
            // It may be there or not.
            told.files.remove(&name);
            continue;
        };
        let data = format!("contents {i}").into_bytes();
        let written = told.of(client.write(ino, fh, 0, &data), ends, at).is_some();
        let synced = i % 2 == 1 && told.of(client.fsync(ino, fh), ends, at).is_some();
        if written {
            told.written.push((name.clone(), data.clone()));
            told.files.insert(name.clone(), (data, synced));
        }
        client.close(ino, fh);
    }
    let renamed = told.of(client.rename(dir, "f2", "g2"), ends, at).is_some();
    if let Some(file) = told.files.remove("f2").filter(|_| renamed) {
        told.files.insert("g2".into(), file);
    }
    told
}

/// Whether the history was long enough to come to this message.
fn ends_at(message: u64, ends: Ends) -> bool {
    let world = World::new(400 + message);
    world.net.messages.cut_at.store(message, Ordering::SeqCst);
    let at = format!("message {message}");
    let over = AtomicBool::new(false);
    let mut cuts = world.net.cuts.subscribe();
    let told = std::thread::scope(|scope| {
        let crashing = (ends == Ends::Server).then(|| {
            let (world, over) = (&world, &over);
            scope.spawn(move || {
                let _cut = world.net.runtime.block_on(cuts.changed());
                if over.load(Ordering::SeqCst) {
                    return;
                }
                // Gone without a word, and another in its place.
                drop(world.take_server());
                world.start();
            })
        });
        let client = loop {
            match world.mount("/") {
                Ok(client) => break client,
                Err(error) => {
                    assert!(matches!(error, NetError::Reach { .. }), "{error}")
                }
            }
        };
        let told = history(&client, ends, &at);
        if world.net.messages.so_far.load(Ordering::SeqCst) < message {
            over.store(true, Ordering::SeqCst);
            world.net.cut_all();
        }
        if let Some(crashing) = crashing {
            crashing.join().unwrap();
        }
        // What nobody has said yet is said now; then nothing is left to say.
        let sync = || client.me.call(|cx| client.fs.ioctl(cx, ROOT, ioctl::SYNC, &[], 0));
        let synced = sync().is_ok();
        assert_eq!(sync(), Ok(Vec::new()), "{at}: said once");
        let told = Told { failed: told.failed || !synced, ..told };
        client.fs.close();
        told
    });
    let me = InProcess::default();
    let look = |dir, name: &str| {
        let entry = me.call(|cx| world.fs.lookup(cx, dir, name.as_bytes())).unwrap();
        entry.attr.map(|attr| attr.ino)
    };
    let dir = look(ROOT, "d").expect("the directory");
    for (name, (data, synced)) in &told.files {
        let Some(ino) = look(dir, name) else {
            assert!(told.failed && !synced, "{at}: {name} is lost, and nobody was told");
            continue;
        };
        let fh = me.call(|cx| world.fs.open(cx, ino, libc::O_RDONLY, false)).unwrap().fh;
        let found = me.call(|cx| {
            let mut out = vec![0; 100];
            let len = world.fs.read(cx, ino, fh, 0, &mut out)?;
            out.truncate(len);
            Ok(out)
        });
        let found = found.unwrap();
        // A file that was removed may be there again, where removing it is lost with the new one.
        let earlier =
            data.starts_with(&found) || told.written.contains(&(name.clone(), found.clone()));
        assert!(found == *data || told.failed && !synced && earlier, "{at}: {name}: {found:?}");
    }
    world.net.messages.so_far.load(Ordering::SeqCst) >= message
}

#[test]
fn programs_do_not_notice_a_connection_that_closes_at_any_message() {
    let reached = (1..).take_while(|message| ends_at(*message, Ends::Connection)).count();
    assert!(reached > 30, "{reached}");
}

#[test]
fn a_server_crash_at_any_message_loses_nothing_silently() {
    let reached = (1..).take_while(|message| ends_at(*message, Ends::Server)).count();
    assert!(reached > 30, "{reached}");
}
