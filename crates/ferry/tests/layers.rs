//! The modules of each crate form layers: none uses itself, also not through others. A use is an
//! import, or a path that begins with `crate`, `self` or `super`; tests and the arguments of macros
//! do not count.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemUse, UseTree, Visibility};

/// The names of a path, or of a module.
type Names = Vec<String>;

/// A module: what it refers to, and the names that it passes on from another module.
#[derive(Default)]
struct Module {
    paths: Vec<Names>,
    reexports: BTreeMap<String, Names>,
}

/// Which modules each one uses, with one name that it takes from there.
type Uses = BTreeMap<Names, BTreeMap<Names, String>>;

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let condition = attribute.parse_args::<syn::Path>();
        attribute.path().is_ident("cfg") && condition.is_ok_and(|path| path.is_ident("test"))
    })
}

/// The paths of an import.
fn flatten(tree: &UseTree, before: &Names, paths: &mut Vec<Names>) {
    let with = |name: &dyn ToString| [before.clone(), vec![name.to_string()]].concat();
    match tree {
        UseTree::Path(path) => flatten(&path.tree, &with(&path.ident), paths),
        UseTree::Name(name) => paths.push(with(&name.ident)),
        UseTree::Rename(rename) => paths.push(with(&rename.ident)),
        UseTree::Glob(_) => paths.push(with(&"*")),
        UseTree::Group(group) => {
            group.items.iter().for_each(|tree| flatten(tree, before, paths));
        }
    }
}

impl Visit<'_> for Module {
    fn visit_item(&mut self, item: &Item) {
        let attributes: &[Attribute] = match item {
            Item::Mod(item) => &item.attrs,
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Use(item) => &item.attrs,
            _ => &[],
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &ItemUse) {
        let mut paths = Vec::new();
        flatten(&item.tree, &Names::new(), &mut paths);
        if matches!(item.vis, Visibility::Inherited) {
            self.paths.extend(paths);
        } else {
            for path in paths {
                self.reexports.insert(path.last().cloned().unwrap_or_default(), path);
            }
        }
    }

    /// Whom an item is visible for is no use of theirs.
    fn visit_visibility(&mut self, _: &Visibility) {}

    fn visit_path(&mut self, path: &syn::Path) {
        self.paths.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }
}

/// The source files below a folder, but for those of tests, with the names of their modules.
fn read(folder: &Path, names: &Names, modules: &mut BTreeMap<Names, Module>) {
    for entry in fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().expect("a name").to_string_lossy().into_owned();
        if stem.ends_with("tests") {
            continue;
        }
        let inner = [names.clone(), vec![stem.clone()]].concat();
        if path.is_dir() {
            read(&path, &inner, modules);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let owner = ["lib", "main", "mod"].contains(&&*stem);
            let source = fs::read_to_string(&path).expect("the file is there");
            let mut module = Module::default();
            module.visit_file(&syn::parse_file(&source).expect("Rust"));
            modules.insert(if owner { names.clone() } else { inner }, module);
        }
    }
}

/// A path from the crate's root; `None`: it leads to another crate or to what the module itself
/// has.
fn from_root(module: &Names, path: &Names) -> Option<Names> {
    let (first, rest) = path.split_first()?;
    let climbs = rest.iter().take_while(|name| *name == "super").count();
    let base = match &**first {
        "crate" => &[],
        "self" => &module[..],
        "super" => &module[..module.len().checked_sub(climbs + 1)?],
        _ => return None,
    };
    Some([base, &rest[climbs..]].concat())
}

/// The module that has what a path from the root names: where the path leads, or where that module
/// takes it from.
fn owner(modules: &BTreeMap<Names, Module>, path: &Names) -> Names {
    let length = (0..=path.len()).rev().find(|length| modules.contains_key(&path[..*length]));
    let found = path[..length.expect("the root is a module")].to_vec();
    let Some(taken) = path.get(found.len()).and_then(|name| modules[&found].reexports.get(name))
    else {
        return found;
    };
    // Without a first word it begins at a child.
    let taken = from_root(&found, taken).unwrap_or_else(|| [&found[..], taken].concat());
    if taken == *path { found } else { owner(modules, &taken) }
}

fn uses(modules: &BTreeMap<Names, Module>) -> Uses {
    let mut uses = Uses::new();
    for (name, module) in modules {
        let users = uses.entry(name.clone()).or_default();
        for path in &module.paths {
            let Some(path) = from_root(name, path) else { continue };
            let owner = owner(modules, &path);
            // The root names all others.
            if owner != *name && !owner.is_empty() {
                users.insert(owner, path.join("::"));
            }
        }
    }
    uses
}

/// All that a module uses, also through others.
fn reachable<'a>(uses: &'a Uses, from: &'a Names) -> BTreeSet<&'a Names> {
    let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
    while let Some(module) = next.pop() {
        for used in uses[module].keys() {
            if reached.insert(used) {
                next.push(used);
            }
        }
    }
    reached
}

/// The uses that are part of a circle, a line each.
fn circles(uses: &Uses) -> Vec<String> {
    let mut lines = Vec::new();
    for (module, used) in uses {
        for (other, name) in used {
            if reachable(uses, other).contains(module) {
                lines.push(format!("{} uses {} ({name})", module.join("::"), other.join("::")));
            }
        }
    }
    lines
}

#[test]
fn no_module_uses_itself_through_others() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("it is below crates/");
    let (mut lines, mut edges) = (Vec::new(), 0);
    for entry in fs::read_dir(crates).expect("the crates") {
        let folder = entry.expect("an entry").path();
        let mut modules = BTreeMap::new();
        read(&folder.join("src"), &Names::new(), &mut modules);
        let uses = uses(&modules);
        edges += uses.values().map(BTreeMap::len).sum::<usize>();
        let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
        lines.extend(circles(&uses).into_iter().map(|line| format!("{name}: {line}")));
    }
    assert!(edges > 1000, "only {edges} uses were found");
    assert!(lines.is_empty(), "modules that use themselves through others:\n{}", lines.join("\n"));
}

fn crate_of(files: &[(&str, &str)]) -> BTreeMap<Names, Module> {
    let parse = |(name, source): &(&str, &str)| {
        let mut module = Module::default();
        module.visit_file(&syn::parse_file(source).expect("Rust"));
        (name.split("::").filter(|name| !name.is_empty()).map(String::from).collect(), module)
    };
    files.iter().map(parse).collect()
}

#[test]
fn a_circle_is_found_through_imports_paths_and_reexports() {
    let low = ("low", "#[cfg(test)] mod tests { use crate::high::High; } struct Low;");
    let layers = crate_of(&[("", "mod low; mod high;"), low, ("high", "use crate::low::Low;")]);
    assert_eq!(circles(&uses(&layers)), Vec::<String>::new());

    let files = [
        ("", ""),
        ("a", "use crate::b::Thing;"),
        ("b", "mod inner; pub(crate) use inner::Thing;"),
        ("b::inner", "fn f() { super::super::c::call(); }"),
        ("c", "fn call() -> crate::a::A {}"),
    ];
    let found = circles(&uses(&crate_of(&files)));
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(found[0].starts_with("a uses b::inner"), "{found:?}");
}
