//! Populated volumes of several shapes.

use super::repaired::{Snapshot, snapshot};
use crate::device::{SimDevice, SimRng, sim_env};
use crate::generator::Generator;
use crate::model::{Model, Outcome};
use crate::ops::Op;
use crate::world::{Opening, World};
use ferry_device::{AlignedBuf, BLOCK_SIZE, BlockDevice};
use ferry_fs::volume::{LOG_MIN, read_superblock};
use ferry_fs::{
    Filesystem, FsOptions, InProcess, LocalFs, MkfsOptions, ROOT, Superblock, XattrFlags, mkfs,
};
use ferry_journal::inspect::home_map;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of every volume.
const VOLUME_BYTES: u64 = 16 << 20;
/// Bytes of its log.
const LOG_BYTES: u64 = LOG_MIN;
/// Names in the large directory: the home store's trees have several levels.
const MANY: u32 = 3000;

/// A volume to be damaged.
pub struct Base {
    /// What it is, for people.
    pub name: &'static str,
    /// The volume as it is to be damaged.
    pub image: SimDevice,
    /// The same volume at an earlier time.
    pub old: SimDevice,
    /// Where everything is.
    pub superblock: Superblock,
    /// What it shows.
    pub snapshot: Snapshot,
    /// Offsets of blocks that hold something and may be damaged, in bytes.
    pub used: Vec<u64>,
    /// The home store may be damaged.
    pub home: bool,
}

/// A volume of each shape.
pub struct Bases(Vec<Base>);

impl Bases {
    /// Makes them; always the same. `home`: the home store's blocks and its map may be damaged,
    /// too.
    pub fn make(home: bool) -> Result<Self, String> {
        let small = |seed| draw(seed, 60, false);
        let long = |seed| draw(seed, 400, false);
        let heavy = |seed| draw(seed, 250, true);
        let shapes: [(&'static str, Vec<Op>, bool); 7] = [
            ("empty", Vec::new(), true),
            ("small, closed", small(1), true),
            ("small, unclean", small(2), false),
            ("long, closed", long(3), true),
            ("long, unclean, much log", long(4), false),
            ("full and cleaned, closed", heavy(5), true),
            ("full and cleaned, unclean", heavy(6), false),
        ];
        let mut bases = Vec::new();
        for (n, (name, ops, closed)) in shapes.into_iter().enumerate() {
            bases.push(lived(name, n as u64, &ops, closed)?);
        }
        bases.push(many_names()?);
        if !home {
            for base in &mut bases {
                let of_home = home_ranges(&base.image, &base.superblock);
                base.used.retain(|at| !of_home.iter().any(|range| range.contains(at)));
                base.home = false;
            }
        }
        Ok(Self(bases))
    }

    /// One of them.
    pub fn pick(&self, rng: &mut SimRng) -> &Base {
        rng.pick(&self.0)
    }
}

fn draw(seed: u64, count: usize, heavy: bool) -> Vec<Op> {
    let mut generator = Generator::new(Model::empty());
    let mut ops = Vec::new();
    if heavy {
        generator = generator.heavy();
        ops = generator.ballast(6);
    }
    ops.extend(generator.draw(&mut SimRng::new(seed), count));
    ops
}

fn fresh(seed: u64) -> Result<Arc<SimDevice>, String> {
    let device = Arc::new(SimDevice::new(VOLUME_BYTES));
    let dyn_device: Arc<dyn BlockDevice> = device.clone();
    let (env, _) = sim_env(seed);
    let options = MkfsOptions { log_size: Some(LOG_BYTES), ..MkfsOptions::default() };
    mkfs(&dyn_device, &options, &env).map_err(|error| error.to_string())?;
    Ok(device)
}

/// A volume on which something was done, as it is after a clean end or after a loss of power.
fn lived(name: &'static str, seed: u64, ops: &[Op], closed: bool) -> Result<Base, String> {
    let device = fresh(seed)?;
    let mut rng = SimRng::new(seed);
    let mut model = Model::empty();
    let mut world = World::open(
        &device,
        Opening { seed, cache_bytes: 2 << 20, time: Duration::ZERO, flush: None },
    )?;
    let mut old = device.crash_image(device.trace_len(), &mut rng);
    for (n, op) in ops.iter().enumerate() {
        if model.outcome(op) == Outcome::Done
            && let Ok(new) = world.run(op, n, &model)
        {
            model.apply(op, n, new);
        }
        if n == ops.len() / 2 {
            old = device.crash_image(device.trace_len(), &mut rng);
        }
    }
    let image = if closed {
        world.close()?;
        device.restart_trace();
        device.crash_image(0, &mut rng)
    } else {
        device.crash_image(device.trace_len(), &mut rng)
    };
    base(name, image, old)
}

/// A directory of many names, with attributes.
fn many_names() -> Result<Base, String> {
    let device = fresh(99)?;
    let (env, _) = sim_env(100);
    let options = FsOptions { background: false, cache_bytes: 4 << 20, ..FsOptions::default() };
    let dyn_device: Arc<dyn BlockDevice> = device.clone();
    let fs = LocalFs::open(dyn_device, options, env).map_err(|error| error.to_string())?;
    let me = InProcess::default();
    for n in 0..MANY {
        let name = format!("a name that is long enough to fill pages, number {n}");
        let entry = me.call(|cx| fs.mknod(cx, ROOT, name.as_bytes(), libc::S_IFREG | 0o644, 0));
        let ino = entry.map_err(|errno| errno.to_string())?.attr.ok_or("made")?.ino;
        if n.is_multiple_of(10) {
            let set =
                me.call(|cx| fs.setxattr(cx, ino, b"user.one", &[7; 200], XattrFlags::default()));
            set.map_err(|errno| errno.to_string())?;
        }
        fs.forget(ino, 1);
    }
    let mut rng = SimRng::new(7);
    fs.sync().map_err(|error| error.to_string())?;
    let old = device.crash_image(device.trace_len() / 2, &mut rng);
    fs.close().map_err(|error| error.to_string())?;
    base("many names", device.crash_image(device.trace_len(), &mut rng), old)
}

fn base(name: &'static str, image: SimDevice, old: SimDevice) -> Result<Base, String> {
    let copy: Arc<dyn BlockDevice> = Arc::new(image.crash_image(0, &mut SimRng::new(0)));
    let snapshot = snapshot(&copy, None);
    let superblock = read_superblock(&copy).map_err(|error| error.to_string())?;
    let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
    let mut used = Vec::new();
    for at in (0..copy.capacity()).step_by(BLOCK_SIZE) {
        copy.read(at, &mut buf).map_err(|error| error.to_string())?;
        if buf.iter().any(|b| *b != 0) {
            used.push(at);
        }
    }
    Ok(Base { name, image, old, superblock, snapshot, used, home: true })
}

/// Where the home store is: its map, and its segments.
fn home_ranges(image: &SimDevice, sb: &Superblock) -> Vec<Range<u64>> {
    let device: Arc<dyn BlockDevice> = Arc::new(image.copy());
    let [first, _] = home_map(&device, &sb.geometry());
    let map = first.expect("a base is not damaged");
    let segments = map.units.into_iter().flatten().chain(map.spare).map(|segment| {
        let offset = sb.segments_offset + u64::from(segment) * sb.segment_len;
        offset..offset + sb.segment_len
    });
    sb.home_map_offsets
        .map(|slot| slot..slot + sb.home_map_len)
        .into_iter()
        .chain(segments)
        .collect()
}
