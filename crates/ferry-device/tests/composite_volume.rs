//! Composite volumes in files: made, opened, refused, with sides replaced.
#![expect(clippy::disallowed_methods, reason = "tests may unwrap")]

use ferry_device::{
    AlignedBuf, BLOCK_SIZE, BlockDevice, CompositeError, CompositeOptions, CompositeVolume,
    DeviceError, HEAD_LEN, Kind, OpenMode,
};
use ferry_env::Env;
use std::fs;
use std::path::{Path, PathBuf};

const SIZE: u64 = 32 << 20;

struct Place(tempfile::TempDir);

impl Place {
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
        let place = Place::new();
        let volume = place.make(kind, &["a", "b"]).unwrap();
        assert!(
            CompositeVolume::is_at(&place.at("vol")) && !CompositeVolume::is_at(&place.at("a"))
        );
        assert_eq!(volume.capacity(), SIZE, "{kind}");
        for at in [0, SIZE / 2, SIZE - BLOCK_SIZE as u64] {
            volume.write(at, &block(7)).unwrap();
        }
        volume.flush().unwrap();
        let used = place.open(OpenMode::ReadOnly).err().unwrap();
        assert!(
            matches!(used, CompositeError::Device(DeviceError::InUse { writing: true, .. })),
            "{used}"
        );
        drop(volume);
        assert!(
            matches!(place.make(kind, &["c", "d"]), Err(CompositeError::Foreign(_))),
            "the name is taken"
        );
        let readers =
            [place.open(OpenMode::ReadOnly).unwrap(), place.open(OpenMode::ReadOnly).unwrap()];
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
fn what_holds_data_is_not_taken_and_half_a_volume_is_not_left() {
    let place = Place::new();
    fs::write(place.at("b"), "foreign").unwrap();
    assert!(
        matches!(place.make(Kind::Linear, &["a", "b"]), Err(CompositeError::Foreign(path)) if path == place.at("b"))
    );
    assert!(!place.at("a").exists() && !place.at("vol").exists());
    assert_eq!(fs::read(place.at("b")).unwrap(), b"foreign");
    assert!(matches!(place.make(Kind::Mirror, &["a"]), Err(CompositeError::Option(_))));
    assert!(place.make(Kind::Mirror, &["a", "a"]).is_err());
}

#[test]
fn components_may_move_and_may_not_be_strangers() {
    let place = Place::new();
    let volume = place.make(Kind::Stripe, &["a", "b"]).unwrap();
    volume.write(0, &block(1)).unwrap();
    volume.write(512 << 10, &block(2)).unwrap();
    drop(volume);
    // In another order, under another name: they know their places.
    fs::rename(place.at("a"), place.at("moved")).unwrap();
    let text = place
        .listed()
        .replace(&place.at("a").display().to_string(), &place.at("moved").display().to_string());
    let (head, lines) = text.split_once("\ncomponent").unwrap();
    let mut lines: Vec<String> = format!("component{lines}").lines().map(str::to_owned).collect();
    lines.reverse();
    fs::write(place.at("vol"), format!("{head}\n{}\n", lines.join("\n"))).unwrap();
    let volume = place.open(OpenMode::ReadWrite).unwrap();
    holds(&volume, 0, 1);
    holds(&volume, 512 << 10, 2);
    drop(volume);
    let other = Place::new();
    drop(other.make(Kind::Stripe, &["a", "b"]).unwrap());
    fs::copy(other.at("b"), place.at("b")).unwrap();
    assert!(matches!(place.open(OpenMode::ReadWrite), Err(CompositeError::Missing { .. })));
    fs::write(place.at("vol"), "FerryFS composite volume 1\nnonsense here\n").unwrap();
    assert!(matches!(place.open(OpenMode::ReadWrite), Err(CompositeError::Descriptor { .. })));
}

#[test]
fn no_file_is_named_twice() {
    let place = Place::new();
    let twice = [("dot/../a", true), ("link", true), ("vol", false)];
    fs::create_dir(place.at("dot")).unwrap();
    std::os::unix::fs::symlink("a", place.at("link")).unwrap();
    for (second, component) in twice {
        for overwrite in [false, true] {
            let paths = vec![place.at("a"), place.at(second)];
            let options = CompositeOptions { kind: Kind::Mirror, paths, size: SIZE, overwrite };
            let made = CompositeVolume::create(&place.at("vol"), &options, &Env::real()).map(drop);
            let error = made.expect_err("it cannot be");
            assert_eq!(matches!(error, CompositeError::Twice { .. }), component, "{error}");
            assert!(!place.at("a").exists() && !place.at("vol").exists(), "what was made is gone");
        }
    }
}

/// Before, the volume was said to be in use by the very process that tried to open it.
#[test]
fn a_list_with_one_component_twice_is_refused_and_says_so() {
    for kind in [Kind::Linear, Kind::Stripe, Kind::Mirror] {
        let place = Place::new();
        drop(place.make(kind, &["a", "b"]).unwrap());
        std::os::unix::fs::symlink("a", place.at("link")).unwrap();
        for again in ["a", "link"] {
            let lines = format!("component {}\n", place.at(again).display());
            let listed =
                place.listed().replace(&format!("component {}\n", place.at("b").display()), &lines);
            fs::write(place.at("twice"), listed).unwrap();
            let opened =
                CompositeVolume::open(&place.at("twice"), OpenMode::ReadWrite, &Env::real())
                    .map(drop);
            assert!(matches!(opened, Err(CompositeError::Twice { .. })), "{opened:?}");
        }
    }
}

#[test]
fn a_side_in_use_elsewhere_is_no_reason_to_go_on_without_it() {
    let place = Place::new();
    drop(place.make(Kind::Mirror, &["a", "b"]).unwrap());
    let used =
        ferry_device::FileDevice::open(&place.at("b"), OpenMode::ReadWrite, &Env::real()).unwrap();
    assert!(matches!(
        place.open(OpenMode::ReadWrite),
        Err(CompositeError::Device(DeviceError::InUse { .. }))
    ));
    drop(used);
    assert!(place.open(OpenMode::ReadWrite).unwrap().components().len() == 2);
}

#[test]
fn a_side_is_replaced_and_the_list_says_so() {
    let place = Place::new();
    let volume = place.make(Kind::Mirror, &["a", "b"]).unwrap();
    volume.write(0, &block(1)).unwrap();
    volume.write(SIZE - BLOCK_SIZE as u64, &block(2)).unwrap();
    fs::write(place.at("foreign"), "foreign").unwrap();
    assert_eq!(replace(&volume, &place.at("x"), &place.at("c")), Err(libc::ENXIO));
    assert_eq!(replace(&volume, &place.at("a"), &place.at("foreign")), Err(libc::EEXIST));
    assert_eq!(replace(&volume, &place.at("a"), &place.at("b")), Err(libc::ETXTBSY));
    assert_eq!(replace(&volume, &place.at("a"), &place.at("c")), Ok(()));
    let name = |name: &str| format!("component {}\n", place.at(name).display());
    let listed = place.listed();
    assert!(
        !listed.contains(&name("a")) && listed.contains(&name("b")) && listed.contains(&name("c")),
        "{listed}"
    );
    assert!(listed.contains("generation 2\n"), "{listed}");
    volume.write(SIZE / 2, &block(3)).unwrap();
    drop(volume);
    // What was never written takes no space on the new side either.
    use std::os::unix::fs::MetadataExt;
    assert!(fs::metadata(place.at("c")).unwrap().blocks() * 512 < HEAD_LEN + (8 << 20));
    fs::remove_file(place.at("b")).unwrap();
    let volume = place.open(OpenMode::ReadWrite).unwrap();
    for (at, byte) in [(0, 1), (SIZE - BLOCK_SIZE as u64, 2), (SIZE / 2, 3)] {
        holds(&volume, at, byte);
    }
    assert!(place.listed().contains("generation 3\n"), "the missing side is stale now");
}

#[test]
fn what_an_interrupted_rebuild_left_is_taken_again() {
    let place = Place::new();
    let volume = place.make(Kind::Mirror, &["a", "b"]).unwrap();
    volume.write(0, &block(1)).unwrap();
    // Closed while it is copied, or just after: either will do.
    volume.replace(&place.at("a"), &place.at("c")).unwrap();
    drop(volume);
    let volume = place.open(OpenMode::ReadWrite).unwrap();
    holds(&volume, 0, 1);
    if place.listed().contains(&format!("component {}\n", place.at("a").display())) {
        assert_eq!(replace(&volume, &place.at("a"), &place.at("c")), Ok(()));
    }
    holds(&volume, 0, 1);
}

#[test]
fn a_stale_side_may_be_built_anew_in_its_own_place() {
    let place = Place::new();
    drop(place.make(Kind::Mirror, &["a", "b"]).unwrap());
    fs::rename(place.at("b"), place.at("away")).unwrap();
    let volume = place.open(OpenMode::ReadWrite).unwrap();
    volume.write(0, &block(1)).unwrap();
    drop(volume);
    fs::rename(place.at("away"), place.at("b")).unwrap();
    let volume = place.open(OpenMode::ReadWrite).unwrap();
    assert_eq!(replace(&volume, &place.at("b"), &place.at("b")), Ok(()));
    drop(volume);
    assert!(place.listed().contains(&format!("component {}\n", place.at("b").display())));
    fs::remove_file(place.at("a")).unwrap();
    holds(&place.open(OpenMode::ReadWrite).unwrap(), 0, 1);
}
