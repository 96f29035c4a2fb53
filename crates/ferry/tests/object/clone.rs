//! `ferry clone`: a clone beside the mount of its source, and what cannot be cloned.

use super::*;

/// A place beside the volume, as a URL.
fn beside(store: &Store, name: &str) -> String {
    format!("dir://{}", store.at(name).display())
}

/// Bytes of all files below a directory.
fn bytes_below(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).expect("it is there").map(|entry| {
        let path = entry.expect("it can be read").path();
        match fs::metadata(&path).expect("it is there") {
            meta if meta.is_dir() => bytes_below(&path),
            meta => meta.len(),
        }
    });
    entries.sum()
}

#[test]
fn a_clone_is_written_beside_its_volume_and_each_has_its_own_files() {
    let store = Store::made();
    let (url, copy) = (store.url(), beside(&store, "copy"));
    store.mount("first");
    write_files(&store.at("first"), 0..200);
    fs::write(store.at("first/large"), noise(8 << 20)).expect("it can be written");
    ok(&store.ferry(&["snapshot", "create", "first", "before"]));
    fs::remove_dir_all(store.at("first/000")).expect("it is there");
    fs::write(store.at("first/large"), "new").expect("it can be written");
    ok(&store.ferry(&["sync", "first"]));

    let made = store.ferry(&["clone", &format!("{url}@before"), &copy]);
    ok(&made);
    let said = String::from_utf8_lossy(&made.stdout).into_owned();
    assert!(said.starts_with(&format!("ferry: {copy} is a clone of before (made 20")), "{said}");
    let pin = snapshots(&store, "first").pop().expect("there is a pin");
    assert!(pin.starts_with("before@") && pin.ends_with("@copy"), "{pin}");
    assert!(said.ends_with(&format!("; {url} has the pin {pin} for it\n")), "{said}");
    assert!(bytes_below(&store.at("copy")) < 64 << 10, "no data is copied");
    ok(&store.ferry(&["fsck", &copy]));

    ok(&store.ferry(&["mount", &copy, "second"]));
    check_files(&store.at("second"), 0..200);
    assert_eq!(fs::read(store.at("second/large")).expect("it is there"), noise(8 << 20));
    write_files(&store.at("second"), 200..300);
    fs::write(store.at("second/large"), "of the clone").expect("it can be written");
    fs::write(store.at("first/more"), "of the volume").expect("it can be written");
    ok(&store.ferry(&["sync", "first"]));
    ok(&store.ferry(&["sync", "second"]));
    assert!(!store.at("first/002").exists() && !store.at("second/more").exists());
    assert!(bytes_below(&store.at("copy")) < 4 << 20, "only what differs is stored");
    ok(&store.ferry(&["scrub", "second"]));
    assert!(store.stats("second")["store"]["gets"].as_u64() > Some(0));

    // The snapshot is deleted; the pin is not.
    ok(&store.ferry(&["snapshot", "delete", "first", "before"]));
    let refused = ["the clone \"copy\" needs this snapshot", "remove that volume first"];
    fails(&store.ferry(&["snapshot", "delete", "first", &pin]), 1, &refused);
    store.kill("first");
    store.ferry(&["umount", "first"]);
    fails(&store.ferry(&["snapshot", "delete", &url, &pin]), 1, &refused);
    ok(&store.ferry(&["snapshot", "create", "second", "of the clone"]));
    ok(&store.ferry(&["umount", "second"]));
    for volume in [&copy, &url] {
        ok(&store.ferry(&["fsck", volume]));
        ok(&store.ferry(&["scrub", volume]));
    }

    // A clone of the clone, while nobody has that.
    let again = beside(&store, "again");
    ok(&store.ferry(&["clone", &format!("{copy}@of the clone"), &again]));
    ok(&store.ferry(&["mount", &again, "second"]));
    check_files(&store.at("second"), 0..300);
    ok(&store.ferry(&["umount", "second"]));
    ok(&store.ferry(&["fsck", &again]));

    fs::rename(store.directory(), store.at("away")).expect("it can be moved");
    let alone = store.ferry(&["mount", &copy, "second"]);
    fails(&alone, 1, &["this is a clone, and the volume \"store\" beside it", "bring it back"]);
    fs::rename(store.at("away"), store.directory()).expect("it can be moved");
    fs::rename(store.at("copy"), store.at("moved")).expect("it can be moved");
    let moved = beside(&store, "moved");
    for url in [moved.clone(), format!("{moved}@of the clone")] {
        for command in ["fsck", "scrub"] {
            fails(&store.ferry(&[command, &url]), 8, &["move it back to \"copy\""]);
        }
        fails(&store.ferry(&["mount", &url, "second"]), 1, &["move it back to \"copy\""]);
    }
    fs::rename(store.at("moved"), store.at("copy")).expect("it can be moved");
    ok(&store.ferry(&["fsck", &copy]));
    fs::remove_dir_all(store.at("again")).expect("it is there");
    fs::remove_dir_all(store.at("copy")).expect("it is there");
    ok(&store.ferry(&["snapshot", "delete", &url, &pin]));
    assert!(snapshots(&store, &url).is_empty());
    ok(&store.ferry(&["fsck", &url]));
}

#[test]
fn what_cannot_be_cloned_is_said_and_nothing_is_changed() {
    let store = Store::made();
    let (url, one) = (store.url(), format!("{}@one", store.url()));
    ok(&store.ferry(&["snapshot", "create", &url, "one"]));
    fs::create_dir_all(store.at("full/sub")).expect("a directory");
    ok(&store.ferry(&["mkfs", &beside(&store, "other")]));
    let before = store.contents();
    let clone = |from: &str, to: &str| store.ferry(&["clone", from, to]);
    let new = beside(&store, "new");
    fails(&clone(&format!("{url}@two"), &new), 1, &["no snapshot \"two\"; there are one"]);
    assert!(!store.at("new").exists(), "nothing is left");
    fails(&clone(&url, &new), 2, &["VOLUME@NAME", "ferry snapshot list"]);
    fails(&clone(&one, &one), 2, &["that is a snapshot, which never changes"]);
    for there in [&url, &beside(&store, "other")] {
        fails(&clone(&one, there), 1, &["there is a FerryFS volume here already"]);
    }
    fails(&clone(&one, &beside(&store, "full")), 1, &["full/sub", "choose an empty directory"]);
    fs::create_dir_all(store.at("begun/c")).expect("a directory");
    fs::write(store.at("begun/c/0000000000000000"), "of a clone").expect("it can be written");
    let begun = beside(&store, "begun");
    fails(&clone(&one, &begun), 1, &["c/0000000000000000", "super is missing", "wait for it"]);
    fails(&store.ferry(&["mkfs", &begun]), 1, &["super is missing", "wait for it"]);
    for elsewhere in [&beside(&store, "full/new"), "s3://bucket/new", "dir:///no/such"] {
        let where_it_may_be = format!("a clone lies in the same directory as {url}");
        fails(&clone(&one, elsewhere), 1, &[elsewhere, &where_it_may_be, "make a volume and copy"]);
    }
    fails(&clone(&one, "new.ferry"), 2, &["a clone lies beside its volume in the store", &url]);
    fails(&clone("file.ferry@one", &new), 2, &["on the same file system", "ferry copy"]);
    store.mount("first");
    fails(&clone("first", &new), 2, &["that is a mount: name the snapshot by", "`ferry clone "]);
    ok(&store.ferry(&["umount", "first"]));
    let names = |contents: &[(PathBuf, u64)], kind: &str| {
        let of_kind =
            contents.iter().filter(|(path, _)| path.starts_with(store.directory().join(kind)));
        of_kind.count()
    };
    assert_eq!(snapshots(&store, &url), ["one"]);
    assert_eq!(names(&store.contents(), "s"), names(&before, "s"));
}

#[test]
fn a_clone_of_an_encrypted_volume_has_its_passphrase() {
    let store = Store::new();
    fs::write(store.at("word"), "open sesame").expect("a passphrase");
    fs::write(store.at("wrong"), "a better one").expect("a passphrase");
    let (url, copy) = (store.url(), beside(&store, "copy"));
    let word = |args: &[&str]| {
        let output = store.ferry(&[args, &["--passphrase-file", "word"]].concat());
        ok(&output);
    };
    word(&["mkfs", &url, "--encrypt"]);
    word(&["mount", &url, "first"]);
    write_files(&store.at("first"), 0..100);
    word(&["snapshot", "create", "first", "one"]);
    word(&["umount", "first"]);
    let from = format!("{url}@one");
    let wrong = store.ferry(&["clone", &from, &copy, "--passphrase-file", "wrong"]);
    fails(&wrong, 1, &["not the passphrase of the volume"]);
    assert!(!store.at("copy").exists(), "nothing is left");
    word(&["clone", &from, &copy]);
    let wrong = store.ferry(&["mount", &copy, "second", "--passphrase-file", "wrong"]);
    fails(&wrong, 1, &["not the passphrase of the volume"]);
    word(&["mount", &copy, "second"]);
    check_files(&store.at("second"), 0..100);
    write_files(&store.at("second"), 100..200);
    ok(&store.ferry(&["umount", "second"]));
    // Each has its own from now on.
    word(&["passphrase", &copy, "--new-passphrase-file", "wrong"]);
    ok(&store.ferry(&["fsck", &copy, "--passphrase-file", "wrong"]));
    word(&["fsck", &url]);
}
