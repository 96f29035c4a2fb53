//! `ferry backup`: from one directory to another, read, checked, restored and refused.

use super::*;

/// What lies in a directory, the locks of the volume there left out.
fn bytes_in(at: &Path) -> u64 {
    let mut bytes = 0;
    for entry in fs::read_dir(at).expect("it is there") {
        let path = entry.expect("it can be read").path();
        bytes += match fs::metadata(&path).expect("it is there") {
            meta if meta.is_file() => meta.len(),
            _ if path.ends_with("lock") => 0,
            _ => bytes_in(&path),
        };
    }
    bytes
}

fn out(output: &Output) -> String {
    ok(output);
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

const LARGE: usize = 10;
const LARGE_BYTES: usize = 3 << 20;

/// Contents of a large file, as they are in a round.
fn large(n: usize, round: usize) -> Vec<u8> {
    let all = noise((LARGE + 2) * LARGE_BYTES);
    let start = n * LARGE_BYTES + round * 4096 + 8;
    all[start..start + LARGE_BYTES].to_vec()
}

fn check_large(at: &Path, changed: usize, round: usize) {
    for n in 0..LARGE {
        let found = fs::read(at.join(format!("large-{n}"))).expect("a file");
        assert!(found == large(n, if n < changed { round } else { 0 }), "file {n}");
    }
}

#[test]
fn backups_are_read_checked_and_restored_and_the_next_one_moves_what_changed() {
    let store = Store::made();
    let (url, to) = (store.url(), store.url_of("backup"));
    let at = store.at("backup");
    store.mount("first");
    write_files(&store.at("first"), 0..1000);
    for n in 0..LARGE {
        fs::write(store.at("first").join(format!("large-{n}")), large(n, 0)).expect("a file");
    }
    // The volume is mounted, and nothing was synced.
    let first = out(&store.ferry(&["backup", "first", &to]));
    assert!(first.starts_with(&format!("{url}: made the snapshot backup-20")), "{first}");
    let next = [" objects, ", "To look into it: ferry mount '", "To restore it: ferry backup '"];
    assert!(next.iter().all(|text| first.contains(text)), "{first}");
    let whole = bytes_in(&at);
    assert!(whole > (LARGE * LARGE_BYTES) as u64, "{whole} bytes");
    let [name] = &snapshots(&store, &url)[..] else { panic!("one snapshot") };
    assert_eq!(snapshots(&store, &to), std::slice::from_ref(name));

    // A tenth is changed, and the volume is used on.
    fs::write(store.at("first/large-0"), large(0, 1)).expect("a file");
    for n in 0..100 {
        fs::write(store.at(&format!("first/000/{n}")), "new").expect("a file");
    }
    ok(&store.ferry(&["snapshot", "create", "first", "second"]));
    let before = store.contents();
    let second = out(&store.ferry(&["backup", &format!("{url}@second"), &to]));
    assert!(second.contains("@second: copied "), "{second}");
    let moved = bytes_in(&at) - whole;
    assert!(moved * 100 <= whole * 15, "{moved} bytes of {whole}");
    assert!(before.iter().all(|file| store.contents().contains(file)), "the volume stays");
    let again = out(&store.ferry(&["backup", &format!("{url}@second"), &to]));
    assert!(again.contains("@second: the backup was there already"), "{again}");
    assert!(bytes_in(&at) - whole < moved + (64 << 10), "it copies nothing");
    assert_eq!(snapshots(&store, &to), [name.clone(), "second".into()]);

    // Each is what it was, beside the owner of the volume and without its store.
    ok(&store.ferry(&["umount", "first"]));
    fs::rename(store.directory(), store.at("away")).expect("it can be moved");
    ok(&store.ferry(&["fsck", &to]));
    ok(&store.ferry(&["scrub", &to]));
    for (snapshot, round) in [(name.as_str(), 0), ("second", 1)] {
        ok(&store.ferry(&["fsck", &format!("{to}@{snapshot}")]));
        ok(&store.ferry(&["mount", &to, "second", "-o", &format!("snapshot={snapshot}")]));
        check_large(&store.at("second"), 1, round);
        check_files(&store.at("second"), if round == 0 { 0..1000 } else { 100..1000 });
        assert!(fs::write(store.at("second/000/0"), "x").is_err(), "it is read only");
        ok(&store.ferry(&["umount", "second"]));
    }
    // Restored under the name of the volume.
    ok(&store.ferry(&["backup", &format!("{to}@{name}"), &url]));
    store.mount("first");
    check_files(&store.at("first"), 0..1000);
    check_large(&store.at("first"), 1, 0);
    write_files(&store.at("first"), 1000..1100);
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.ferry(&["fsck", &url]));
    ok(&store.ferry(&["fsck", &format!("{url}@{name}")]));
    // The backup itself is used: it has the newest one, and takes no more then.
    ok(&store.ferry(&["mount", &to, "second"]));
    check_large(&store.at("second"), 1, 1);
    let restored = store.ferry(&["backup", &format!("{url}@{name}"), &to]);
    fails(&restored, 1, &["was restored from a backup", "back it up to another store"]);
    let away = store.url_of("away");
    let in_use = store.ferry(&["backup", &format!("{away}@{name}"), &to]);
    fails(&in_use, 1, &["backup: in use by process ", "unmount it there", "--take-over"]);
    fs::write(store.at("second/more"), "more").expect("a file");
    ok(&store.ferry(&["umount", "second"]));
    let own = store.ferry(&["backup", &format!("{away}@{name}"), &to]);
    fails(&own, 1, &["backup: it is a volume of its own since 20", "choose another store"]);
    ok(&store.ferry(&["mount", &to, "second"]));
    assert_eq!(fs::read(store.at("second/more")).expect("it is there"), b"more");
    ok(&store.ferry(&["umount", "second"]));
}

#[test]
fn a_backup_is_refused_where_it_cannot_be_or_would_overwrite_something() {
    let store = Store::made();
    let (url, one) = (store.url(), format!("{}@one", store.url()));
    ok(&store.ferry(&["snapshot", "create", &url, "one"]));
    let to = |name: &str| store.url_of(name);
    for target in [url.clone(), format!("{url}/inner")] {
        let same = store.ferry(&["backup", &one, &target]);
        fails(&same, 2, &["this is the store of the volume", "choose another store"]);
    }
    assert!(!store.directory().join("inner").exists());
    fails(&store.ferry(&["backup", &one, "file.ferry"]), 2, &["a backup goes to a store"]);
    fails(&store.ferry(&["backup", "local.ferry", &to("b")]), 2, &["only volumes in a store"]);
    fails(&store.ferry(&["backup", &one, &to("no/b")]), 1, &["there is no such directory"]);
    let none = store.ferry(&["backup", &format!("{url}@none"), &to("b")]);
    fails(&none, 1, &["there is no snapshot \"none\"; there are one"]);
    assert!(!store.at("b").exists(), "nothing is made");
    fs::create_dir(store.at("foreign")).expect("a directory");
    fs::write(store.at("foreign/file"), "x").expect("a file");
    let foreign = store.ferry(&["backup", &one, &to("foreign")]);
    fails(&foreign, 1, &["foreign/file: this is no part of a FerryFS volume", "left alone"]);
    assert_eq!(fs::read_dir(store.at("foreign")).expect("it is there").count(), 1);
    // Another volume, mounted or not.
    ok(&store.ferry(&["mkfs", &to("other")]));
    let bytes = bytes_in(&store.at("other"));
    let other = store.ferry(&["backup", &url, &to("other")]);
    fails(&other, 1, &["there is another volume here, which is left alone"]);
    assert_eq!(bytes_in(&store.at("other")), bytes);
    assert_eq!(snapshots(&store, &url), ["one"], "a target that is refused costs no snapshot");
    // A snapshot of one name and other contents.
    ok(&store.ferry(&["backup", &one, &to("b")]));
    ok(&store.ferry(&["snapshot", "delete", &url, "one"]));
    store.mount("first");
    fs::write(store.at("first/file"), "new").expect("a file");
    ok(&store.ferry(&["snapshot", "create", "first", "one"]));
    let renamed = store.ferry(&["backup", &one, &to("b")]);
    fails(&renamed, 1, &["b: it has another snapshot one: delete that one"]);
    ok(&store.ferry(&["snapshot", "delete", &to("b"), "one"]));
    ok(&store.ferry(&["backup", &one, &to("b")]));
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.ferry(&["mount", &format!("{}@one", to("b")), "second"]));
    assert_eq!(fs::read(store.at("second/file")).expect("it is there"), b"new");
    ok(&store.ferry(&["umount", "second"]));
}

#[test]
fn a_backup_whose_target_is_full_or_that_was_killed_goes_on_when_it_is_run_again() {
    let store = Store::made();
    let one = format!("{}@one", store.url());
    store.mount("first");
    fs::write(store.at("first/large"), noise(40 << 20)).expect("a file");
    ok(&store.ferry(&["snapshot", "create", "first", "one"]));
    fs::create_dir(store.at("small")).expect("a directory");
    let small = Small::new(store.at("small"), 24 << 20);
    let to = store.url_of("small/b");
    let full = store.ferry(&["backup", &one, &to]);
    // What other uploads have left decides whether there is room to mark the target as closed. A
    // warning says so if not, before the error.
    let text = said(&full);
    let error = text.lines().last().unwrap_or_default();
    let wanted = ["No space left on device", "To go on: ferry backup '", "@one' 'dir://"];
    assert!(wanted.iter().all(|wanted| error.contains(wanted)), "{full:?}");
    assert_eq!(full.status.code(), Some(1));
    for command in [vec!["snapshot", "list", &to], vec!["mount", &to, "second"]] {
        let refused = store.ferry(&command);
        assert!(
            said(&refused).contains("a backup was begun here that has not ended"),
            "{refused:?}"
        );
    }
    small.resize(256 << 20);
    // Killed wherever it is, its owner is known to be dead.
    for n in 1..=3 {
        let mut killed = Command::new("timeout");
        killed.args(["--signal=KILL", &format!("0.0{}", 2 * n), FERRY, "backup", &one, &to]);
        killed.output().expect("it runs");
    }
    let copied = out(&store.ferry(&["backup", &one, &to]));
    assert!(copied.contains(": copied ") || copied.contains("there already"), "{copied}");
    ok(&store.ferry(&["fsck", &to]));
    ok(&store.ferry(&["mount", &format!("{to}@one"), "second"]));
    assert!(fs::read(store.at("second/large")).expect("it is there") == noise(40 << 20));
    ok(&store.ferry(&["umount", "second"]));
    ok(&store.ferry(&["umount", "first"]));
    drop(small);
}

#[test]
fn a_backup_of_an_encrypted_volume_shows_nothing_and_takes_new_passphrases() {
    let store = Store::new();
    for (name, word) in [("old", "open sesame\n"), ("new", "a better one")] {
        fs::write(store.at(name), word).expect("a passphrase");
    }
    let (url, to) = (store.url(), store.url_of("backup"));
    let mkfs = ["mkfs", &url, "--encrypt", "--compress", "off", "--passphrase-file", "old"];
    ok(&store.ferry(&mkfs));
    ok(&store.try_mount("first", &["-o", "passphrase_file=old"]));
    let text = "a line that nobody may read\n".repeat(5000);
    fs::write(store.at("first/hidden"), &text).expect("a file");
    fails(&store.ferry(&["backup", "first", &to]), 1, &["encrypted", "--passphrase-file"]);
    assert!(!store.at("backup").exists());
    ok(&store.ferry(&["backup", "first", &to, "--passphrase-file", "old"]));
    ok(&store.ferry(&["umount", "first"]));
    let mut grep = Command::new("grep");
    grep.args(["-rlE", "nobody may read|sesame|hidden"]).arg(store.at("backup"));
    let found = grep.output().expect("grep runs");
    assert!(found.stdout.is_empty() && bytes_in(&store.at("backup")) > 100_000, "{found:?}");
    let check = |passphrase: &str| {
        ok(&store.ferry(&["fsck", &to, "--passphrase-file", passphrase]));
        let word = format!("ro,passphrase_file={passphrase}");
        ok(&store.ferry(&["mount", &to, "second", "-o", &word]));
        assert_eq!(fs::read_to_string(store.at("second/hidden")).expect("a file"), text);
        ok(&store.ferry(&["umount", "second"]));
    };
    check("old");
    let change = ["passphrase", &url, "--new-passphrase-file", "new", "--passphrase-file", "old"];
    ok(&store.ferry(&change));
    check("old");
    ok(&store.ferry(&["backup", &url, &to, "--passphrase-file", "new"]));
    check("new");
    let old = store.ferry(&["fsck", &to, "--passphrase-file", "old"]);
    assert!(!old.status.success() && said(&old).contains("not the passphrase"), "{old:?}");
}
