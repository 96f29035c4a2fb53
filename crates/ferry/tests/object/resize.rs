//! `ferry resize` of a volume in a store: mounted, followed, killed, and with nobody at it.

use super::replica::{caught_up, follow, sync};
use super::*;
use rustix::fs::statvfs;
use std::io::ErrorKind;

const MIB: u64 = 1 << 20;

/// All bytes of a mount, as `df` shows them, in MiB.
fn total(at: &Path) -> u64 {
    let of = statvfs(at).expect("it is mounted");
    of.f_blocks * of.f_frsize / MIB
}

/// Writes large files from this number on until there is no space. Returns the first that failed.
fn fill(at: &Path, from: usize) -> usize {
    (from..1000)
        .find(|n| {
            let path = at.join(format!("large-{n}"));
            let written = fs::write(&path, noise(MIB as usize + n));
            let Err(error) = written else { return false };
            assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
            fs::remove_file(path).expect("it can be removed");
            true
        })
        .expect("the volume is full before")
}

fn check_large(at: &Path, files: std::ops::Range<usize>) {
    for n in files {
        let found = fs::read(at.join(format!("large-{n}"))).expect("a file");
        assert!(found == noise(MIB as usize + n), "file {n}");
    }
}

#[test]
fn a_volume_in_a_store_gets_another_size_while_it_is_mounted_and_a_replica_follows() {
    let store = Store::new();
    let (first, second) = (store.at("first"), store.at("second"));
    let resize = |target: &str, size: &str| store.ferry(&["resize", target, size]);
    ok(&store.ferry(&["mkfs", &store.url(), "--size", "64M"]));
    store.mount("first");
    follow(&store);
    let full = fill(&first, 0);
    assert!((20..64).contains(&full), "{full}");
    ok(&resize("first", "256M"));
    let at = total(&first);
    assert!((200..256).contains(&at), "{at}");
    let end = fill(&first, full);
    assert!(end > full + 100, "{end}");
    sync(&store);
    caught_up(&store);
    assert_eq!(total(&second), total(&first));
    check_large(&second, 0..end);
    ok(&store.ferry(&["snapshot", "create", "first", "long"]));

    // It cannot be too small, and says how small it can be.
    fails(&resize("first", "100M"), 1, &["too small", "it has to have"]);
    fails(&resize("first", "max"), 1, &["say a size"]);
    fails(&resize("second", "512M"), 1, &["mount that owns the volume"]);
    (full..end).for_each(|n| fs::remove_file(first.join(format!("large-{n}"))).expect("removed"));
    ok(&resize(&store.url(), "128M"));
    let at = total(&first);
    assert!((90..128).contains(&at), "{at}");
    store.kill("first");
    store.mount("first");
    assert_eq!(total(&first), at);
    check_large(&first, 0..full);
    check_large(&first.join(".snapshots/long"), full..end);
    sync(&store);
    caught_up(&store);
    assert_eq!(total(&second), at);
    check_large(&second, 0..full);
    ok(&store.ferry(&["umount", "second"]));
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.ferry(&["fsck", &store.url()]));

    // With nobody at it; then what it was before, with the size that it had.
    ok(&resize(&store.url(), "3T"));
    ok(&store.ferry(&["fsck", &store.url()]));
    let backup = store.url_of("backup");
    ok(&store.ferry(&["backup", &store.url(), &backup]));
    ok(&store.ferry(&["fsck", &backup]));
    store.mount("first");
    let at = total(&first);
    assert!((2_900_000..3_145_728).contains(&at), "{at}");
    check_large(&first, 0..full);
    ok(&store.ferry(&["umount", "first"]));
    ok(&store.ferry(&["rollback", &format!("{}@long", store.url())]));
    ok(&store.ferry(&["fsck", &store.url()]));
    store.mount("first");
    assert!((200..256).contains(&total(&first)));
    check_large(&first, 0..end);
    ok(&store.ferry(&["umount", "first"]));
}
