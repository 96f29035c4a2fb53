//! `ferry diff`: every kind of change by name, and random ones against a walk of both trees.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use rustix::fs::{FallocateFlags, XattrFlags, fallocate, getxattr, listxattr, setxattr};

use super::*;

/// What `ferry diff` says, and its exit code; the rest of the URLs follows an `@`.
fn diff(store: &Store, old: &str, new: &str) -> (Vec<String>, Option<i32>) {
    let of = |name: &str| if name.is_empty() { store.url() } else { store.url() + "@" + name };
    let done = store.ferry(&["diff", &of(old), &of(new)]);
    assert!(done.stderr.is_empty(), "{done:?}");
    let text = String::from_utf8(done.stdout).expect("UTF-8");
    (text.lines().map(str::to_owned).collect(), done.status.code())
}

fn punch(path: &Path, offset: u64, len: u64) {
    let file = fs::File::options().write(true).open(path).expect("it is there");
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, how, offset, len).expect("a hole");
}

fn attribute(path: &Path, value: &[u8]) {
    setxattr(path, "user.test", value, XattrFlags::empty()).expect("an attribute");
}

fn write_at(path: &Path, offset: u64, bytes: &[u8]) {
    let file = fs::File::options().write(true).open(path).expect("it is there");
    file.write_all_at(bytes, offset).expect("a write");
}

/// Other bytes with the same checksum: the checksum's polynomial is added to them.
fn forged(mut block: Vec<u8>) -> Vec<u8> {
    let polynomial: u64 = 1 | 0x82f6_3b78 << 1;
    block[512..520].iter_mut().zip(polynomial.to_le_bytes()).for_each(|(a, b)| *a ^= b);
    block
}

const FILES: [&str; 18] = [
    "unchanged",
    "removed",
    "byte",
    "appended",
    "cut",
    "hole",
    "zeros",
    "mode",
    "attribute",
    "both",
    "moved",
    "moved-changed",
    "linked",
    "again",
    "saved",
    "saved-same",
    "forged",
    "saved-mode",
];

fn make_states(at: &Path) {
    for name in FILES {
        fs::write(at.join(name), noise(100_000)).expect("a file");
    }
    write_at(&at.join("zeros"), 8192, &[0; 8192]);
    fs::write(at.join("small"), "some bytes").expect("a file");
    symlink("here", at.join("link")).expect("a link");
    fs::write(at.join("becomes a directory"), "").expect("a file");
    for name in ["tree", "tree/deeper", "removed-tree", "anew", "mode-directory"] {
        fs::create_dir(at.join(name)).expect("a directory");
    }
    for name in ["tree/a", "tree/b", "tree/deeper/c", "removed-tree/d", "anew/e"] {
        fs::write(at.join(name), noise(9000)).expect("a file");
    }
}

fn change_states(at: &Path) {
    let path = |name: &str| at.join(name);
    let mode = |name: &str| {
        fs::set_permissions(path(name), fs::Permissions::from_mode(0o700)).expect("a mode");
    };
    fs::remove_file(path("removed")).expect("it is there");
    fs::write(path("made"), "").expect("a file");
    write_at(&path("byte"), 70_000, b"!");
    write_at(&path("appended"), 100_000, b"!");
    fs::File::options().write(true).open(path("cut")).and_then(|f| f.set_len(99_999)).expect("cut");
    punch(&path("hole"), 8192, 8192);
    punch(&path("zeros"), 8192, 8192);
    mode("mode");
    mode("mode-directory");
    attribute(&path("attribute"), b"value");
    mode("both");
    write_at(&path("both"), 0, b"!");
    fs::rename(path("moved"), path("to")).expect("a move");
    fs::rename(path("moved-changed"), path("to-changed")).expect("a move");
    write_at(&path("to-changed"), 0, b"!");
    fs::hard_link(path("linked"), path("linked-too")).expect("a link");
    write_at(&path("again"), 0, &noise(100_000));
    for (name, bytes) in [("saved", "new".into()), ("saved-same", noise(100_000))] {
        fs::write(path("temporary"), bytes).expect("a file");
        fs::rename(path("temporary"), path(name)).expect("a move");
    }
    fs::write(path("temporary"), noise(100_000)).expect("a file");
    fs::rename(path("temporary"), path("saved-mode")).expect("a move");
    mode("saved-mode");
    let block = noise(4096);
    assert_eq!(crc32c(&block), crc32c(&forged(block.clone())));
    write_at(&path("forged"), 0, &forged(block));
    fs::write(path("small"), "same bytes").expect("a file");
    fs::remove_file(path("link")).expect("it is there");
    symlink("there", path("link")).expect("a link");
    fs::remove_file(path("becomes a directory")).expect("it is there");
    fs::create_dir(path("becomes a directory")).expect("a directory");
    fs::rename(path("tree"), path("moved-tree")).expect("a move");
    fs::rename(path("moved-tree/b"), path("out")).expect("a move");
    write_at(&path("moved-tree/deeper/c"), 0, b"!");
    fs::remove_dir_all(path("removed-tree")).expect("it is there");
    // The directory is another one, and has the same file.
    fs::rename(path("anew/e"), path("temporary")).expect("a move");
    fs::remove_dir(path("anew")).expect("it is empty");
    fs::create_dir(path("anew")).expect("a directory");
    fs::rename(path("temporary"), path("anew/e")).expect("a move");
}

#[test]
fn every_kind_of_change_between_two_snapshots_is_told() {
    let store = Store::made();
    store.mount("first");
    let at = store.at("first");
    make_states(&at);
    ok(&store.ferry(&["snapshot", "create", "first", "old"]));
    change_states(&at);
    ok(&store.ferry(&["snapshot", "create", "first", "new"]));

    let (lines, code) = diff(&store, "old", "new");
    let wanted = [
        "M /appended",
        "A /attribute",
        "- /becomes a directory",
        "+ /becomes a directory",
        "M /both",
        "M /byte",
        "M /cut",
        "M /forged",
        "M /hole",
        "M /link",
        "+ /linked-too",
        "+ /made",
        "A /mode",
        "A /mode-directory",
        "R /moved -> /to",
        "R /moved-changed -> /to-changed",
        "M /moved-tree/deeper/c",
        "- /removed",
        "- /removed-tree",
        "- /removed-tree/d",
        "M /saved",
        "A /saved-mode",
        "M /small",
        "M /to-changed",
        "R /tree -> /moved-tree",
        "R /tree/b -> /out",
    ];
    assert_eq!(lines, wanted);
    assert_eq!(code, Some(1));
    // The other way round.
    let (lines, code) = diff(&store, "new", "old");
    for line in ["- /made", "+ /removed-tree/d", "R /to -> /moved", "M /tree/deeper/c"] {
        assert!(lines.iter().any(|found| found == line), "{line} is not in {lines:?}");
    }
    assert_eq!((lines.len(), code), (wanted.len(), Some(1)));
    assert_eq!(diff(&store, "old", "old"), (vec![], Some(0)));

    let [old, new] = ["old", "new"].map(|name| format!("{}@{name}", store.url()));
    let json = store.ferry(&["diff", &old, &new, "--json"]);
    let text = String::from_utf8(json.stdout).expect("UTF-8");
    assert!(text.contains("{\"change\":\"made\",\"path\":\"/made\"}\n"), "{text}");
    assert!(text.contains("{\"change\":\"moved\",\"path\":\"/moved\",\"to\":\"/to\"}\n"), "{text}");
    assert_eq!(text.lines().count(), wanted.len());

    // The volume itself.
    let used = store.ferry(&["diff", &new, &store.url()]);
    fails(&used, 2, &["in use", "name a snapshot of it"]);
    ok(&store.ferry(&["umount", "first"]));
    assert_eq!(diff(&store, "new", ""), (vec![], Some(0)));
    store.mount("first");
    fs::write(at.join("later"), "").expect("a file");
    ok(&store.ferry(&["umount", "first"]));
    assert_eq!(diff(&store, "new", ""), (vec!["+ /later".to_owned()], Some(1)));

    let none = store.ferry(&["diff", &old, &format!("{}@none", store.url())]);
    fails(&none, 2, &["no snapshot \"none\"; there are old, new"]);
    let other = Store::made();
    let of_two = store.ferry(&["diff", &old, &other.url()]);
    fails(&of_two, 2, &["are of two volumes", "diff -r"]);
}

#[test]
fn a_diff_asks_once_for_the_passphrase_of_a_volume() {
    let store = Store::new();
    fs::write(store.at("word"), "open sesame").expect("a passphrase");
    ok(&store.ferry(&["mkfs", &store.url(), "--encrypt", "--passphrase-file", "word"]));
    ok(&store.ferry(&["snapshot", "create", &store.url(), "one", "--passphrase-file", "word"]));
    let one = format!("{}@one", store.url());
    // A pipe can be read once.
    let mut once = Command::new("bash");
    let script = "\"$0\" diff \"$1\" \"$2\" --passphrase-file <(printf 'open sesame')";
    once.args(["-c", script, FERRY, &one, &store.url()]);
    ok(&once.output().expect("bash runs"));
}

/// What a walk sees of a file or directory.
#[derive(Clone, PartialEq)]
struct Seen {
    dir: u64,
    ino: u64,
    kind: u32,
    contents: Vec<u8>,
    attributes: (u32, u32, u32, Vec<u8>),
}

fn walk(root: &Path) -> BTreeMap<PathBuf, Seen> {
    let mut all = BTreeMap::new();
    let mut todo = vec![root.to_owned()];
    while let Some(directory) = todo.pop() {
        let dir = fs::metadata(&directory).expect("it is there").ino();
        for entry in fs::read_dir(&directory).expect("it can be read") {
            let path = entry.expect("it can be read").path();
            let meta = fs::symlink_metadata(&path).expect("it is there");
            let contents = match meta.file_type() {
                kind if kind.is_dir() => Vec::new(),
                kind if kind.is_symlink() => {
                    fs::read_link(&path).expect("a link").into_os_string().into_encoded_bytes()
                }
                _ => fs::read(&path).expect("it can be read"),
            };
            let mut value = [0; 64];
            let has = !meta.is_symlink() && listxattr(&path, &mut [0_u8; 64]).expect("a list") > 0;
            let len = if has { getxattr(&path, "user.test", &mut value).expect("it") } else { 0 };
            let attributes = (meta.mode(), meta.uid(), meta.gid(), value[..len].to_vec());
            let kind = meta.mode() & libc::S_IFMT;
            let seen = Seen { dir, ino: meta.ino(), kind, contents, attributes };
            let name = Path::new("/").join(path.strip_prefix(root).expect("it is below"));
            if meta.is_dir() {
                todo.push(path);
            }
            all.insert(name, seen);
        }
    }
    all
}

/// What a diff should say of two walks.
fn wanted(old: &BTreeMap<PathBuf, Seen>, new: &BTreeMap<PathBuf, Seen>) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    let change = |a: &Seen, b: &Seen| match () {
        () if a.contents != b.contents => Some('M'),
        () if a.attributes != b.attributes => Some('A'),
        () => None,
    };
    let named =
        |path: &Path, one: &Seen| (one.dir, path.file_name().map(ToOwned::to_owned), one.ino);
    let names = [old, new]
        .map(|tree| tree.iter().map(|(path, one)| named(path, one)).collect::<BTreeSet<_>>());
    let only = |tree: &BTreeMap<PathBuf, Seen>, others: &BTreeSet<_>| -> BTreeMap<PathBuf, Seen> {
        let differs = tree.iter().filter(|(path, one)| !others.contains(&named(path, one)));
        differs.map(|(path, one)| (path.clone(), one.clone())).collect()
    };
    let (mut lost, mut got) = (only(old, &names[1]), only(new, &names[0]));
    // Every name of an inode that both have tells of its change, except names that it got.
    let before: HashMap<u64, &Seen> = old.values().map(|one| (one.ino, one)).collect();
    let changes =
        new.iter().filter_map(|(path, one)| Some((path, change(before.get(&one.ino)?, one)?)));
    let mut changes: BTreeMap<&PathBuf, char> = changes.collect();
    let same: Vec<PathBuf> = lost.keys().cloned().collect();
    for path in same {
        if got.get(&path).is_some_and(|one| one.ino == lost[&path].ino) {
            got.remove(&path);
            lost.remove(&path);
        }
    }
    for (path, one) in lost.clone() {
        let to = got.iter().find(|(_, other)| other.ino == one.ino).map(|(to, _)| to.clone());
        if let Some(to) = to {
            lines.insert(format!("R {} -> {}", path.display(), to.display()));
            got.remove(&to);
            lost.remove(&path);
        }
    }
    for (path, one) in lost {
        match got.get(&path).filter(|other| other.kind == one.kind) {
            Some(other) => {
                lines.extend(change(&one, other).map(|c| format!("{c} {}", path.display())));
                changes.remove(&path);
                got.remove(&path);
            }
            None => drop(lines.insert(format!("- {}", path.display()))),
        }
    }
    for path in got.keys() {
        lines.insert(format!("+ {}", path.display()));
        changes.remove(path);
    }
    lines.extend(changes.iter().map(|(path, c)| format!("{c} {}", path.display())));
    lines
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }

    fn path(&mut self, root: &Path) -> PathBuf {
        let mut path = root.to_owned();
        for _ in 0..[0, 0, 1, 1, 2][self.below(5)] {
            path.push(format!("d{}", self.below(2)));
        }
        path.join(format!("{}{}", ["d", "f", "f"][self.below(3)], self.below(4)))
    }

    /// One operation; many are refused, which is an operation, too.
    fn change(&mut self, root: &Path) -> std::io::Result<()> {
        let (path, other) = (self.path(root), self.path(root));
        let at = [0, 1, 4096, 5000, 8192, 12_288][self.below(6)];
        let bytes = noise([8, 4096, 8192, 20_000][self.below(4)]);
        match self.below(40) {
            0..4 => fs::create_dir(path),
            4 => fs::remove_dir_all(path),
            5..10 => fs::write(path, bytes),
            10..13 => fs::write(path, format!("{at}")),
            13..16 => fs::File::options().write(true).open(path)?.write_all_at(&bytes, at),
            16..19 => fs::File::options().write(true).open(path)?.write_all_at(b"!", at),
            19..21 => fs::File::options().write(true).open(path)?.set_len(at),
            21..23 => {
                let file = fs::File::options().write(true).open(path)?;
                let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                Ok(fallocate(file, how, at, 4096)?)
            }
            23..25 => fs::remove_file(path),
            25..31 => fs::rename(path, other),
            31..34 => fs::hard_link(path, other),
            34..37 => {
                let mode = [0o600, 0o700, 0o755][self.below(3)];
                fs::set_permissions(path, fs::Permissions::from_mode(mode))
            }
            _ => Ok(setxattr(path, "user.test", format!("{at}").as_bytes(), XattrFlags::empty())?),
        }
    }
}

#[test]
fn a_diff_of_random_changes_says_what_a_walk_of_both_trees_finds() {
    for seed in 1..=3 {
        let mut random = Random(seed);
        let store = Store::made();
        store.mount("first");
        let states: Vec<String> = (0..5).map(|state| format!("{state}")).collect();
        for state in &states {
            let done = (0..400).filter(|_| random.change(&store.at("first")).is_ok()).count();
            assert!(done > 30, "seed {seed}: {done} changes");
            ok(&store.ferry(&["snapshot", "create", "first", state]));
        }
        ok(&store.ferry(&["umount", "first"]));
        let walks = states.iter().map(|state| {
            ok(&store.ferry(&["mount", &format!("{}@{state}", store.url()), "second"]));
            let walk = walk(&store.at("second"));
            ok(&store.ferry(&["umount", "second"]));
            walk
        });
        let walks: Vec<_> = walks.collect();
        for (old, new) in [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4), (4, 1)] {
            let (lines, code) = diff(&store, &states[old], &states[new]);
            let wanted = wanted(&walks[old], &walks[new]);
            assert_eq!(
                lines.iter().cloned().collect::<BTreeSet<_>>(),
                wanted,
                "seed {seed}, {old} {new}"
            );
            assert_eq!(code, Some(i32::from(!wanted.is_empty())));
            let path = |line: &str| line[2..].split(" -> ").next().map(str::to_owned);
            assert!(lines.is_sorted_by_key(|line| path(line)), "{lines:?}");
        }
    }
}
