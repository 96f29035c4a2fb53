//! Composite volumes in files: made, opened, refused, with sides replaced.

use ferry_device::{
    AlignedBuf, BLOCK_SIZE, BlockDevice, CompositeError, CompositeOptions, CompositeVolume,
    DeviceError, HEAD_LEN, Kind, OpenMode,
};
use ferry_env::Env;
use std::fs;
use std::path::{Path, PathBuf};

const SIZE: u64 = 32 << 20;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().canonicalize().unwrap().join(name)
    }

    fn make(&self, kind: Kind, names: &[&str]) -> Result<CompositeVolume, CompositeError> {
        let paths = names.iter().map(|name| self.at(name)).collect();
        let options = CompositeOptions { kind, paths, size: SIZE, overwrite: false };
        CompositeVolume::create(&self.at("vol"), &options, &Env::real())
    }

    fn open(&self, mode: OpenMode) -> Result<CompositeVolume, CompositeError> {
        CompositeVolume::open(&self.at("vol"), mode, &Env::real())
    }

    fn listed(&self) -> String {
        fs::read_to_string(self.at("vol")).unwrap()
    }
}

fn block(byte: u8) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
    buf.fill(byte);
    buf
}

fn holds(dev: &dyn BlockDevice, offset: u64, byte: u8) {
    let mut buf = block(0);
    dev.read(offset, &mut buf).unwrap();
    assert!(buf[..] == block(byte)[..], "at {offset}");
}

fn replace(volume: &CompositeVolume, old: &Path, new: &Path) -> Result<(), i32> {
    volume.replace(old, new).map_err(|error| error.raw_os_error().unwrap())?;
    while volume.is_rebuilding() {
        std::thread::yield_now();
    }
    Ok(())
}

#[test]
fn every_kind_is_made_owned_closed_and_opened_again() {
    for kind in [Kind::Linear, Kind::Stripe, Kind::Mirror] {
        let folder = Folder::new();
        let volume = folder.make(kind, &["a", "b"]).unwrap();
        assert!(
            CompositeVolume::is_at(&folder.at("vol")) && !CompositeVolume::is_at(&folder.at("a"))
        );
        assert_eq!(volume.capacity(), SIZE, "{kind}");
        for at in [0, SIZE / 2, SIZE - BLOCK_SIZE as u64] {
            volume.write(at, &block(7)).unwrap();
        }
        volume.flush().unwrap();
        let used = folder.open(OpenMode::ReadOnly).err().unwrap();
        assert!(
            matches!(used, CompositeError::Device(DeviceError::InUse { writing: true, .. })),
            "{used}"
        );
        drop(volume);
        assert!(
            matches!(folder.make(kind, &["c", "d"]), Err(CompositeError::Foreign(_))),
            "the name is taken"
        );
        let readers =
            [folder.open(OpenMode::ReadOnly).unwrap(), folder.open(OpenMode::ReadOnly).unwrap()];
        for at in [0, SIZE / 2, SIZE - BLOCK_SIZE as u64] {
            readers.iter().for_each(|reader| holds(reader, at, 7));
        }
        assert_eq!(
            readers[0].write(0, &block(1)).unwrap_err().raw_os_error(),
            Some(libc::EROFS),
            "{kind}"
        );
    }
}

#[test]
fn a_component_with_data_is_refused_and_no_partial_volume_is_left() {
    let folder = Folder::new();
    fs::write(folder.at("b"), "foreign").unwrap();
    assert!(
        matches!(folder.make(Kind::Linear, &["a", "b"]), Err(CompositeError::Foreign(path)) if path == folder.at("b"))
    );
    assert!(!folder.at("a").exists() && !folder.at("vol").exists());
    assert_eq!(fs::read(folder.at("b")).unwrap(), b"foreign");
    assert!(matches!(folder.make(Kind::Mirror, &["a"]), Err(CompositeError::Option(_))));
    assert!(folder.make(Kind::Mirror, &["a", "a"]).is_err());
}

#[test]
fn components_may_move_and_may_not_be_strangers() {
    let folder = Folder::new();
    let volume = folder.make(Kind::Stripe, &["a", "b"]).unwrap();
    volume.write(0, &block(1)).unwrap();
    volume.write(512 << 10, &block(2)).unwrap();
    drop(volume);
    // In another order, under another name: they know their places.
    fs::rename(folder.at("a"), folder.at("moved")).unwrap();
    let text = folder
        .listed()
        .replace(&folder.at("a").display().to_string(), &folder.at("moved").display().to_string());
    let (head, lines) = text.split_once("\ncomponent").unwrap();
    let mut lines: Vec<String> = format!("component{lines}").lines().map(str::to_owned).collect();
    lines.reverse();
    fs::write(folder.at("vol"), format!("{head}\n{}\n", lines.join("\n"))).unwrap();
    let volume = folder.open(OpenMode::ReadWrite).unwrap();
    holds(&volume, 0, 1);
    holds(&volume, 512 << 10, 2);
    drop(volume);
    let other = Folder::new();
    drop(other.make(Kind::Stripe, &["a", "b"]).unwrap());
    fs::copy(other.at("b"), folder.at("b")).unwrap();
    assert!(matches!(folder.open(OpenMode::ReadWrite), Err(CompositeError::Missing { .. })));
    fs::write(folder.at("vol"), "FerryFS composite volume 1\nnonsense here\n").unwrap();
    assert!(matches!(folder.open(OpenMode::ReadWrite), Err(CompositeError::Descriptor { .. })));
}

#[test]
fn no_file_is_named_twice() {
    let folder = Folder::new();
    let twice = [("dot/../a", true), ("link", true), ("vol", false)];
    fs::create_dir(folder.at("dot")).unwrap();
    std::os::unix::fs::symlink("a", folder.at("link")).unwrap();
    for (second, component) in twice {
        for overwrite in [false, true] {
            let paths = vec![folder.at("a"), folder.at(second)];
            let options = CompositeOptions { kind: Kind::Mirror, paths, size: SIZE, overwrite };
            let made = CompositeVolume::create(&folder.at("vol"), &options, &Env::real()).map(drop);
            let error = made.expect_err("it cannot be");
            assert_eq!(matches!(error, CompositeError::Twice { .. }), component, "{error}");
            assert!(
                !folder.at("a").exists() && !folder.at("vol").exists(),
                "what was made is gone"
            );
        }
    }
}

/// Before, the volume was said to be in use by the very process that tried to open it.
#[test]
fn a_list_with_one_component_twice_is_refused_and_says_so() {
    for kind in [Kind::Linear, Kind::Stripe, Kind::Mirror] {
        let folder = Folder::new();
        drop(folder.make(kind, &["a", "b"]).unwrap());
        std::os::unix::fs::symlink("a", folder.at("link")).unwrap();
        for again in ["a", "link"] {
            let lines = format!("component {}\n", folder.at(again).display());
            let listed = folder
                .listed()
                .replace(&format!("component {}\n", folder.at("b").display()), &lines);
            fs::write(folder.at("twice"), listed).unwrap();
            let opened =
                CompositeVolume::open(&folder.at("twice"), OpenMode::ReadWrite, &Env::real())
                    .map(drop);
            assert!(matches!(opened, Err(CompositeError::Twice { .. })), "{opened:?}");
        }
    }
}

#[test]
fn a_mirror_does_not_open_without_a_side_that_is_in_use_elsewhere() {
    let folder = Folder::new();
    drop(folder.make(Kind::Mirror, &["a", "b"]).unwrap());
    let used =
        ferry_device::FileDevice::open(&folder.at("b"), OpenMode::ReadWrite, &Env::real()).unwrap();
    assert!(matches!(
        folder.open(OpenMode::ReadWrite),
        Err(CompositeError::Device(DeviceError::InUse { .. }))
    ));
    drop(used);
    assert!(folder.open(OpenMode::ReadWrite).unwrap().components().len() == 2);
}

#[test]
fn a_side_is_replaced_and_the_list_says_so() {
    let folder = Folder::new();
    let volume = folder.make(Kind::Mirror, &["a", "b"]).unwrap();
    volume.write(0, &block(1)).unwrap();
    volume.write(SIZE - BLOCK_SIZE as u64, &block(2)).unwrap();
    fs::write(folder.at("foreign"), "foreign").unwrap();
    assert_eq!(replace(&volume, &folder.at("x"), &folder.at("c")), Err(libc::ENXIO));
    assert_eq!(replace(&volume, &folder.at("a"), &folder.at("foreign")), Err(libc::EEXIST));
    assert_eq!(replace(&volume, &folder.at("a"), &folder.at("b")), Err(libc::ETXTBSY));
    assert_eq!(replace(&volume, &folder.at("a"), &folder.at("c")), Ok(()));
    let name = |name: &str| format!("component {}\n", folder.at(name).display());
    let listed = folder.listed();
    assert!(
        !listed.contains(&name("a")) && listed.contains(&name("b")) && listed.contains(&name("c")),
        "{listed}"
    );
    assert!(listed.contains("generation 2\n"), "{listed}");
    volume.write(SIZE / 2, &block(3)).unwrap();
    drop(volume);
    // What was never written takes no space on the new side either.
    use std::os::unix::fs::MetadataExt;
    assert!(fs::metadata(folder.at("c")).unwrap().blocks() * 512 < HEAD_LEN + (8 << 20));
    fs::remove_file(folder.at("b")).unwrap();
    let volume = folder.open(OpenMode::ReadWrite).unwrap();
    for (at, byte) in [(0, 1), (SIZE - BLOCK_SIZE as u64, 2), (SIZE / 2, 3)] {
        holds(&volume, at, byte);
    }
    assert!(folder.listed().contains("generation 3\n"), "the missing side is stale now");
}

#[test]
fn an_interrupted_replacement_can_be_repeated() {
    let folder = Folder::new();
    let volume = folder.make(Kind::Mirror, &["a", "b"]).unwrap();
    volume.write(0, &block(1)).unwrap();
    // Closed while it is copied, or just after: either will do.
    volume.replace(&folder.at("a"), &folder.at("c")).unwrap();
    drop(volume);
    let volume = folder.open(OpenMode::ReadWrite).unwrap();
    holds(&volume, 0, 1);
    if folder.listed().contains(&format!("component {}\n", folder.at("a").display())) {
        assert_eq!(replace(&volume, &folder.at("a"), &folder.at("c")), Ok(()));
    }
    holds(&volume, 0, 1);
}

#[test]
fn a_stale_side_may_be_rebuilt_in_place() {
    let folder = Folder::new();
    drop(folder.make(Kind::Mirror, &["a", "b"]).unwrap());
    fs::rename(folder.at("b"), folder.at("away")).unwrap();
    let volume = folder.open(OpenMode::ReadWrite).unwrap();
    volume.write(0, &block(1)).unwrap();
    drop(volume);
    fs::rename(folder.at("away"), folder.at("b")).unwrap();
    let volume = folder.open(OpenMode::ReadWrite).unwrap();
    assert_eq!(replace(&volume, &folder.at("b"), &folder.at("b")), Ok(()));
    drop(volume);
    assert!(folder.listed().contains(&format!("component {}\n", folder.at("b").display())));
    fs::remove_file(folder.at("a")).unwrap();
    holds(&folder.open(OpenMode::ReadWrite).unwrap(), 0, 1);
}
