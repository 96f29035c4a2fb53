//! Random sequences of operations, held against a plain model of what POSIX says they do.

use crate::requests::tests::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

#[derive(Clone, Debug)]
enum Op {
    Make(usize, usize, u32),
    Remove(usize, usize, bool),
    Link((usize, usize), (usize, usize)),
    Rename((usize, usize), (usize, usize), u8),
    Attribute(usize, usize, bool),
    /// A lookup that is not taken back.
    Know(usize, usize),
    /// One lookup, or all, of one of those that are known.
    Forget(usize, bool),
    Reopen,
}

/// A name in some directory, chosen among those that are there.
fn name() -> impl Strategy<Value = (usize, usize)> {
    (0..8_usize, 0..NAMES.len())
}

fn op() -> impl Strategy<Value = Op> {
    let kind = prop_oneof![
        Just(libc::S_IFREG),
        Just(libc::S_IFDIR),
        Just(libc::S_IFDIR),
        Just(libc::S_IFIFO)
    ];
    prop_oneof![
        6 => (name(), kind).prop_map(|((d, n), kind)| Op::Make(d, n, kind)),
        3 => (name(), any::<bool>()).prop_map(|((d, n), dir)| Op::Remove(d, n, dir)),
        2 => (name(), name()).prop_map(|(a, b)| Op::Link(a, b)),
        6 => (name(), name(), 0..4_u8).prop_map(|(a, b, flags)| Op::Rename(a, b, flags.saturating_sub(1))),
        2 => (name(), any::<bool>()).prop_map(|((d, n), set)| Op::Attribute(d, n, set)),
        4 => name().prop_map(|(d, n)| Op::Know(d, n)),
        2 => (0..16_usize, any::<bool>()).prop_map(|(known, all)| Op::Forget(known, all)),
        1 => Just(Op::Reopen),
    ]
}

/// An inode of the model.
#[derive(Clone, Debug, Default)]
struct Node {
    kind: u32,
    parent: Ino,
    names: BTreeMap<String, Ino>,
    links: u32,
    attribute: bool,
}

/// The model: inodes by the numbers that the file system gave them.
struct Model {
    nodes: BTreeMap<Ino, Node>,
    /// Lookups that were not taken back.
    known: BTreeMap<Ino, u64>,
    /// Those of them that have no name any more.
    orphans: BTreeSet<Ino>,
}

impl Model {
    fn new() -> Self {
        let root = Node { kind: libc::S_IFDIR, parent: ROOT, links: 2, ..Node::default() };
        let nodes = BTreeMap::from([(ROOT, root)]);
        Self { nodes, known: BTreeMap::new(), orphans: BTreeSet::new() }
    }

    fn dirs(&self) -> Vec<Ino> {
        self.nodes.iter().filter(|(_, n)| n.kind == libc::S_IFDIR).map(|(ino, _)| *ino).collect()
    }

    fn dir(&self, choice: usize) -> Ino {
        let dirs = self.dirs();
        dirs[choice % dirs.len()]
    }

    fn at(&self, dir: Ino, name: &str) -> Option<Ino> {
        self.nodes[&dir].names.get(name).copied()
    }

    fn is_dir(&self, ino: Ino) -> bool {
        self.nodes[&ino].kind == libc::S_IFDIR
    }

    fn is_below(&self, ino: Ino, above: Ino) -> bool {
        ino == above || (ino != ROOT && self.is_below(self.nodes[&ino].parent, above))
    }

    fn node(&mut self, ino: Ino) -> &mut Node {
        self.nodes.get_mut(&ino).unwrap()
    }

    fn set(&mut self, dir: Ino, name: &str, ino: Ino) {
        self.node(dir).names.insert(name.into(), ino);
        if self.is_dir(ino) {
            self.node(ino).parent = dir;
            self.node(dir).links += 1;
        }
    }

    fn unset(&mut self, dir: Ino, name: &str) {
        let ino = self.node(dir).names.remove(name).unwrap();
        if self.is_dir(ino) {
            self.node(dir).links -= 1;
        }
    }

    /// Takes a name and one link of what it leads to.
    fn drop_name(&mut self, dir: Ino, name: &str) {
        let ino = self.at(dir, name).unwrap();
        self.unset(dir, name);
        let node = self.node(ino);
        node.links = if node.kind == libc::S_IFDIR { 0 } else { node.links - 1 };
        if node.links == 0 {
            self.nodes.remove(&ino);
            self.orphans.extend(self.known.contains_key(&ino).then_some(ino));
        }
    }

    /// Whether `victim` may be removed by one who says that it is (not) a directory.
    fn removable(&self, victim: Ino, dir: bool) -> Result<(), i32> {
        match (self.is_dir(victim), dir) {
            (true, false) => Err(libc::EISDIR),
            (false, true) => Err(libc::ENOTDIR),
            (true, true) if !self.nodes[&victim].names.is_empty() => Err(libc::ENOTEMPTY),
            _ => Ok(()),
        }
    }

    fn rename(
        &mut self,
        (da, na): (Ino, &str),
        (db, nb): (Ino, &str),
        flags: u8,
    ) -> Result<(), i32> {
        let source = self.at(da, na).ok_or(libc::ENOENT)?;
        let target = self.at(db, nb);
        if flags == 2 {
            let target = target.ok_or(libc::ENOENT)?;
            let loops =
                |moved, target| da != db && self.is_dir(moved) && self.is_below(target, moved);
            if loops(source, db) || loops(target, da) {
                return Err(libc::EINVAL);
            }
            self.unset(da, na);
            if (da, na) != (db, nb) {
                self.unset(db, nb);
                self.set(db, nb, source);
            }
            self.set(da, na, target);
            return Ok(());
        }
        if flags == 1 && target.is_some() {
            return Err(libc::EEXIST);
        }
        if da != db && self.is_dir(source) && self.is_below(db, source) {
            return Err(libc::EINVAL);
        }
        if target == Some(source) {
            return Ok(());
        }
        if let Some(target) = target {
            self.removable(target, self.is_dir(source))?;
            self.drop_name(db, nb);
        }
        self.unset(da, na);
        self.set(db, nb, source);
        Ok(())
    }

    /// Does `op` here and there, and holds the outcomes against each other.
    fn step(&mut self, world: &mut World, op: &Op) {
        let name = |n: usize| NAMES[n];
        match *op {
            Op::Reopen => {
                world.reopen();
                self.known.clear();
                self.orphans.clear();
            }
            Op::Know(d, n) => {
                let dir = self.dir(d);
                let found = world.lookup(dir, name(n)).unwrap().map(|attr| attr.ino);
                assert_eq!(found, self.at(dir, name(n)));
                if let Some(ino) = found {
                    *self.known.entry(ino).or_default() += 1;
                }
            }
            Op::Forget(known, all) => {
                let Some((ino, count)) =
                    self.known.iter().nth(known).map(|(ino, count)| (*ino, *count))
                else {
                    return;
                };
                let less = if all { count } else { 1 };
                world.fs.forget(ino, less);
                self.known.insert(ino, count - less);
                if count == less {
                    self.known.remove(&ino);
                    if self.orphans.remove(&ino) {
                        assert!(!world.stored(ino), "nobody knows it any more");
                    }
                }
            }
            Op::Make(d, n, kind) => {
                let dir = self.dir(d);
                let made = match kind {
                    libc::S_IFDIR => world.mkdir(dir, name(n)),
                    kind => world.mknod(dir, name(n), kind | 0o644),
                };
                if self.at(dir, name(n)).is_some() {
                    assert_eq!(code(made), libc::EEXIST);
                    return;
                }
                let links = if kind == libc::S_IFDIR { 2 } else { 1 };
                let ino = made.unwrap();
                assert!(self.nodes.insert(ino, Node { kind, links, ..Node::default() }).is_none());
                self.set(dir, name(n), ino);
            }
            Op::Remove(d, n, as_dir) => {
                let dir = self.dir(d);
                let removed =
                    if as_dir { world.rmdir(dir, name(n)) } else { world.unlink(dir, name(n)) };
                let want = match self.at(dir, name(n)) {
                    None => Err(libc::ENOENT),
                    Some(victim) => {
                        self.removable(victim, as_dir).map(|()| self.drop_name(dir, name(n)))
                    }
                };
                assert_eq!(removed.map_err(|e| e.0), want);
            }
            Op::Link((da, na), (db, nb)) => {
                let (da, db) = (self.dir(da), self.dir(db));
                let Some(ino) = self.at(da, name(na)) else { return };
                let linked = world.link(ino, db, name(nb)).map_err(|e| e.0);
                let want = match (self.is_dir(ino), self.at(db, name(nb))) {
                    (true, _) => Err(libc::EPERM),
                    (false, Some(_)) => Err(libc::EEXIST),
                    (false, None) => {
                        self.node(ino).links += 1;
                        self.set(db, name(nb), ino);
                        Ok(())
                    }
                };
                assert_eq!(linked, want);
            }
            Op::Rename((da, na), (db, nb), flags) => {
                let (da, db) = (self.dir(da), self.dir(db));
                let as_flags =
                    RenameFlags { no_replace: flags == 1, exchange: flags == 2, whiteout: false };
                let renamed =
                    world.rename_with((da, name(na)), (db, name(nb)), as_flags).map_err(|e| e.0);
                assert_eq!(renamed, self.rename((da, name(na)), (db, name(nb)), flags), "{op:?}");
            }
            Op::Attribute(d, n, set) => {
                let Some(ino) = self.at(self.dir(d), name(n)) else { return };
                if set {
                    world.setxattr(ino, "user.x", b"v").unwrap();
                } else {
                    let removed = world.me.call(|cx| world.fs.removexattr(cx, ino, b"user.x"));
                    assert_eq!(removed.is_ok(), self.nodes[&ino].attribute);
                }
                self.node(ino).attribute = set;
            }
        }
    }

    fn compare(&self, world: &World) {
        for (ino, node) in &self.nodes {
            let attr = world.attr(*ino);
            assert_eq!(
                (attr.mode & libc::S_IFMT, attr.nlink),
                (node.kind, node.links),
                "inode {ino}"
            );
            assert_eq!(world.getxattr(*ino, "user.x").is_ok(), node.attribute);
            if node.kind == libc::S_IFDIR {
                assert_eq!(world.list(*ino), node.names, "names in {ino}");
                assert_eq!(world.ino(*ino, ".."), node.parent);
            }
        }
        for ino in &self.orphans {
            assert_eq!(world.attr(*ino).nlink, 0);
        }
        let inodes = self.nodes.len() + self.orphans.len();
        assert_eq!(world.fs.counters.inodes(), inodes as u64);
    }

    /// Does `ops` in a new world, and looks at what came of them; `between` is called after each.
    fn run(mut world: World, ops: &[Op], between: fn(&World)) {
        let mut model = Self::new();
        for op in ops {
            model.step(&mut world, op);
            between(&world);
        }
        model.compare(&world);
        if model.orphans.is_empty() {
            world.check();
        }
        model.step(&mut world, &Op::Reopen);
        model.compare(&world);
        world.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn the_namespace_does_what_the_model_does(ops in proptest::collection::vec(op(), 1..120)) {
        Model::run(World::new(), &ops, |_| ());
    }

    #[test]
    fn inodes_that_leave_memory_after_each_operation_do_what_the_model_does(
        ops in proptest::collection::vec(op(), 1..120)
    ) {
        Model::run(cold_inodes::none_stays(), &ops, cold_inodes::all_leave);
    }
}
