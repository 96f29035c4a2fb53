//! A composite volume by its path: makes and opens the components that its descriptor lists.

use super::descriptor::{Descriptor, DescriptorFile, is_descriptor, listed};
use super::error::CompositeError;
use super::header::{
    COMPONENTS_MAX, ComponentHeader, HEAD_LEN, HEADER_OFFSETS, MAP_OFFSETS, SIDES_MAX, Side,
    io_error, random_set,
};
use super::kind::Kind;
use super::layout::STRIPE_CHUNK;
use super::mirror::{MirrorDevice, Observer, clean_map, region_len};
use super::span::SpanDevice;
use crate::buffer::{AlignedBuf, BLOCK_SIZE};
use crate::device::{BlockDevice, ComponentStats, Io, Longest};
use crate::error::DeviceError;
use crate::file::{FileDevice, OpenMode};
use crate::started::{ReadDone, ReadRing};
use crate::timing::FlushTiming;
use ferry_env::Env;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What kind of composite to make.
#[derive(Clone, Debug)]
pub struct CompositeOptions {
    /// How the components make one device.
    pub kind: Kind,
    /// The components: files, made where absent, or block devices.
    pub paths: Vec<PathBuf>,
    /// Bytes of the composite, as far as its components are files. A block device is used to its
    /// end.
    pub size: u64,
    /// Overwrite what is there.
    pub overwrite: bool,
}

enum Device {
    Span(SpanDevice),
    Mirror(MirrorDevice),
}

/// A composite volume, opened and owned.
pub struct CompositeVolume {
    // First, so that it has come to rest before the descriptor is given up.
    device: Device,
    descriptor: Arc<DescriptorFile>,
    env: Env,
    created: Vec<PathBuf>,
}

/// Keeps the descriptor true when the mirror changes.
struct Keeper(Arc<DescriptorFile>);

impl Keeper {
    fn change(&self, change: impl FnOnce(&mut Descriptor)) -> io::Result<()> {
        self.0.change(change).map_err(|error| {
            tracing::error!(%error, "the volume's file could not be brought up to date; the components know better");
            errno_of(error)
        })
    }
}

impl Observer for Keeper {
    fn raised(&self, generation: u64) -> io::Result<()> {
        self.change(|descriptor| descriptor.generation = generation)
    }

    fn rebuilt(&self, old: &str, new: &str) {
        // A side that is listed and stale is left alone.
        let removed = self.change(|descriptor| {
            descriptor.components.retain(|path| path != old || path == new);
        });
        drop(removed);
    }
}

impl CompositeVolume {
    /// Whether `path` is the descriptor of a composite volume.
    pub fn is_at(path: &Path) -> bool {
        is_descriptor(path)
    }

    /// Where the components are that the descriptor at `path` lists. `None`: it is none.
    pub fn listed(path: &Path) -> Option<Vec<PathBuf>> {
        Some(listed(path)?.components.into_iter().map(PathBuf::from).collect())
    }

    /// Makes the components and the descriptor at `path`. What is on the components behind their
    /// heads is not touched.
    pub fn create(
        path: &Path,
        options: &CompositeOptions,
        env: &Env,
    ) -> Result<Self, CompositeError> {
        let mut created = Vec::new();
        let made = create(path, options, env, &mut created)
            .and_then(|()| Self::open(path, OpenMode::ReadWrite, env));
        match made {
            Ok(volume) => Ok(Self { created, ..volume }),
            Err(error) => {
                remove(&created);
                Err(error)
            }
        }
    }

    /// Undoes [`CompositeVolume::create`], as far as it made files.
    pub fn remove_created(self) {
        let created = self.created;
        drop(self.device);
        drop(self.descriptor);
        remove(&created);
    }

    /// Opens what the descriptor at `path` lists.
    pub fn open(path: &Path, mode: OpenMode, env: &Env) -> Result<Self, CompositeError> {
        let descriptor = Arc::new(DescriptorFile::open(path, mode, env)?);
        let listed = descriptor.get();
        let mut sides: Vec<Side> = Vec::new();
        let mut absent = Vec::new();
        for name in &listed.components {
            let same = |side: &&Side| {
                Path::new(&side.name).canonicalize().ok() == Path::new(name).canonicalize().ok()
            };
            if let Some(first) = sides.iter().find(same) {
                return Err(CompositeError::Twice {
                    first: first.name.clone(),
                    second: name.clone(),
                });
            }
            match open_component(name, &listed, mode, env)? {
                Ok(side) => sides.push(side),
                Err(why) => absent.push(format!("{name} ({why})")),
            }
        }
        let device = match listed.kind {
            Kind::Mirror => {
                for side in &absent {
                    tracing::warn!(side, "a side of the mirror is absent");
                }
                let keeper = Arc::new(Keeper(Arc::clone(&descriptor)));
                let read_only = mode == OpenMode::ReadOnly;
                Device::Mirror(MirrorDevice::open(sides, read_only, listed.generation, keeper)?)
            }
            kind => Device::Span(span(kind, sides, absent)?),
        };
        Ok(Self { device, descriptor, env: env.clone(), created: Vec::new() })
    }

    fn inner(&self) -> &dyn BlockDevice {
        match &self.device {
            Device::Span(span) => span,
            Device::Mirror(mirror) => mirror,
        }
    }

    /// A rebuild is under way.
    pub fn is_rebuilding(&self) -> bool {
        matches!(&self.device, Device::Mirror(mirror) if mirror.is_rebuilding())
    }

    /// The device for a new side, and whether it holds zeros everywhere. Only what is empty, or was
    /// a side of this mirror and is none now (stale, or left by a rebuild that did not end), is
    /// taken. Sides that are in use are locked.
    fn open_new(
        &self,
        path: &Path,
        listed: &Descriptor,
    ) -> Result<(FileDevice, bool), CompositeError> {
        let size = self.inner().capacity() + HEAD_LEN;
        let Ok(found) = fs::metadata(path) else {
            return Ok((FileDevice::create(path, size, false, &self.env)?, true));
        };
        if found.is_file() && found.len() == 0 {
            return Ok((FileDevice::create(path, size, true, &self.env)?, true));
        }
        let device =
            FileDevice::open(path, OpenMode::ReadWrite, &self.env).map_err(
                |error| match error {
                    DeviceError::InUse { pid, .. } if pid == std::process::id() => {
                        CompositeError::OwnPart(path.into())
                    }
                    error => error.into(),
                },
            )?;
        let name = path.display().to_string();
        let header = ComponentHeader::read(&device).map_err(io_error("read", &name))?;
        let left_over =
            header.is_some_and(|header| header.set == listed.set && header.kind == Kind::Mirror);
        // A file that somebody has filled with zeros is still somebody's.
        if !left_over && (found.is_file() || !is_blank(&device).map_err(io_error("read", &name))?) {
            return Err(CompositeError::Foreign(path.into()));
        }
        if found.is_file() {
            drop(device);
            return Ok((FileDevice::create(path, size, true, &self.env)?, true));
        }
        Ok((device, false))
    }

    /// Begins to build `new` in the place of the side `old`, as [`BlockDevice::replace`] does, and
    /// says more of what is wrong.
    pub fn begin_replace(&self, old: &Path, new: &Path) -> Result<(), CompositeError> {
        let Device::Mirror(mirror) = &self.device else { return Err(CompositeError::NoMirror) };
        if mirror.is_rebuilding() {
            return Err(CompositeError::Rebuilding);
        }
        let listed = self.descriptor.get();
        let same = |name: &&String| {
            Path::new(name) == old
                || old.canonicalize().is_ok_and(|old| *name == &*old.to_string_lossy())
        };
        let old = listed
            .components
            .iter()
            .find(same)
            .ok_or_else(|| CompositeError::NoSide(old.into()))?;
        let (device, zeroed) = self.open_new(new, &listed)?;
        let name = component_name(new)?;
        // Listed before anything counts on it; what is listed and never completed is left alone.
        self.descriptor.change(|descriptor| {
            if !descriptor.components.contains(&name) {
                descriptor.components.push(name.clone());
            }
        })?;
        let id = self.env.entropy.next_u64();
        mirror
            .rebuild(old, name.clone(), Arc::new(device), id, zeroed)
            .map_err(io_error("rebuild on", &name))
    }
}

fn create(
    path: &Path,
    options: &CompositeOptions,
    env: &Env,
    created: &mut Vec<PathBuf>,
) -> Result<(), CompositeError> {
    let (kind, count) = (options.kind, options.paths.len());
    let (least, most) = if kind == Kind::Mirror { (2, SIDES_MAX) } else { (1, COMPONENTS_MAX) };
    if !(least..=most).contains(&count) {
        return Err(CompositeError::Option(format!(
            "a {kind} volume has {least} to {most} components, not {count}"
        )));
    }
    refuse_existing(path, options.overwrite)?;
    let block = BLOCK_SIZE as u64;
    let share = match kind {
        Kind::Mirror => options.size,
        Kind::Linear => options.size.div_ceil(count as u64),
        Kind::Stripe => options.size.div_ceil(count as u64).next_multiple_of(STRIPE_CHUNK),
    };
    let share = share.next_multiple_of(block);
    let mut devices: Vec<(String, FileDevice)> = Vec::new();
    for component in &options.paths {
        let known = component.canonicalize().ok();
        let twice = devices.iter().find(|(name, _)| known.as_deref() == Some(Path::new(name)));
        if let Some((first, _)) = twice {
            return Err(CompositeError::Twice {
                first: first.clone(),
                second: component.display().to_string(),
            });
        }
        let device = make_component(component, HEAD_LEN + share, options.overwrite, env, created)?;
        devices.push((component_name(component)?, device));
    }
    let own = path.canonicalize().ok();
    if devices.iter().any(|(name, _)| own.as_deref() == Some(Path::new(name))) {
        return Err(CompositeError::Option(format!(
            "{}: the volume's own file, which lists its components, cannot be one of them",
            path.display()
        )));
    }
    let mut lens: Vec<u64> =
        devices.iter().map(|(_, device)| device.capacity().saturating_sub(HEAD_LEN)).collect();
    let shortest = lens.iter().copied().min().unwrap_or_default();
    if shortest < STRIPE_CHUNK {
        return Err(CompositeError::Option(format!(
            "a component needs at least {} bytes",
            HEAD_LEN + STRIPE_CHUNK
        )));
    }
    let unit = match kind {
        Kind::Linear => 0,
        Kind::Stripe => STRIPE_CHUNK,
        Kind::Mirror => {
            lens.fill(shortest);
            region_len(shortest)
        }
    };
    let set = random_set(env);
    let ids: Vec<u64> = devices.iter().map(|_| env.entropy.next_u64()).collect();
    for (slot, ((name, device), len)) in devices.iter().zip(lens).enumerate() {
        let header = ComponentHeader {
            kind,
            set,
            id: ids[slot],
            slot: slot as u32,
            slots: count as u32,
            len,
            unit,
            generation: 1,
            active: if kind == Kind::Mirror { ids.clone() } else { Vec::new() },
        };
        prepare(device, &header).map_err(io_error("write the header of", name))?;
    }
    let components = devices.into_iter().map(|(name, _)| name).collect();
    let existed = path.exists();
    drop(DescriptorFile::create(path, &Descriptor { set, kind, generation: 1, components }, env)?);
    if !existed {
        created.push(path.into());
    }
    Ok(())
}

/// Writes a new component's head.
fn prepare(device: &FileDevice, header: &ComponentHeader) -> io::Result<()> {
    let map = match header.kind {
        Kind::Mirror => clean_map(&header.set, header.len, header.unit),
        _ => AlignedBuf::zeroed(BLOCK_SIZE),
    };
    MAP_OFFSETS.into_iter().try_for_each(|offset| device.write(offset, &map))?;
    // Whole or not at all: a header of an earlier life must not be the one that is found.
    let zeros = AlignedBuf::zeroed(BLOCK_SIZE);
    HEADER_OFFSETS.into_iter().try_for_each(|offset| device.write(offset, &zeros))?;
    device.flush()?;
    header.write(device)
}

fn refuse_existing(path: &Path, overwrite: bool) -> Result<(), CompositeError> {
    let Ok(found) = fs::metadata(path) else { return Ok(()) };
    if !found.is_file() {
        let detail = "the volume's own file lists its components and must be a regular file".into();
        return Err(CompositeError::Descriptor { path: path.into(), detail });
    }
    if found.len() > 0 && !overwrite { Err(CompositeError::Foreign(path.into())) } else { Ok(()) }
}

fn make_component(
    path: &Path,
    size: u64,
    overwrite: bool,
    env: &Env,
    created: &mut Vec<PathBuf>,
) -> Result<FileDevice, CompositeError> {
    let Ok(found) = fs::metadata(path) else {
        let device = FileDevice::create(path, size, false, env)?;
        created.push(path.into());
        return Ok(device);
    };
    if found.is_file() && (overwrite || found.len() == 0) {
        return Ok(FileDevice::create(path, size, true, env)?);
    }
    if !found.file_type().is_block_device() {
        return Err(CompositeError::Foreign(path.into()));
    }
    let device = FileDevice::open(path, OpenMode::ReadWrite, env)?;
    let blank =
        overwrite || is_blank(&device).map_err(io_error("read", &path.display().to_string()))?;
    if blank { Ok(device) } else { Err(CompositeError::Foreign(path.into())) }
}

/// Nothing but zeros where a file system or a component would have something.
fn is_blank(device: &FileDevice) -> io::Result<bool> {
    let mut front =
        AlignedBuf::zeroed(device.capacity().clamp(BLOCK_SIZE as u64, HEAD_LEN) as usize);
    device.read(0, &mut front)?;
    Ok(front.iter().all(|byte| *byte == 0))
}

/// The component's path as the descriptor has it: absolute, in one line.
fn component_name(path: &Path) -> Result<String, CompositeError> {
    let name = path.canonicalize().map_err(io_error("find", &path.display().to_string()))?;
    let name = name.to_str().filter(|name| !name.contains('\n')).map(str::to_owned);
    name.ok_or_else(|| {
        CompositeError::Option(format!(
            "{}: a component's path must be UTF-8 and one line",
            path.display()
        ))
    })
}

fn remove(created: &[PathBuf]) {
    for path in created {
        if let Err(error) = fs::remove_file(path) {
            tracing::warn!(%error, "cannot remove {}", path.display());
        }
    }
}

/// A component, or why there is none. Errors are those that no mirror may go on with: somebody uses
/// it.
fn open_component(
    name: &str,
    listed: &Descriptor,
    mode: OpenMode,
    env: &Env,
) -> Result<Result<Side, String>, CompositeError> {
    let device = match FileDevice::open(Path::new(name), mode, env) {
        Ok(device) => device,
        Err(error @ (DeviceError::InUse { .. } | DeviceError::Busy(_))) => return Err(error.into()),
        Err(DeviceError::Io { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            return Err(io_error("open", name)(source));
        }
        Err(DeviceError::Io { source, .. }) => return Ok(Err(source.to_string())),
        Err(error) => return Ok(Err(error.to_string())),
    };
    let header = match ComponentHeader::read(&device) {
        Ok(Some(header)) if header.set == listed.set && header.kind == listed.kind => header,
        Ok(Some(_)) => return Ok(Err("it belongs to another volume".into())),
        Ok(None) => return Ok(Err("it holds no component, or was cut off".into())),
        Err(error) => return Ok(Err(error.to_string())),
    };
    Ok(Ok(Side { name: name.into(), device: Arc::new(device), header }))
}

/// All places must be taken, each once.
fn span(
    kind: Kind,
    mut sides: Vec<Side>,
    mut absent: Vec<String>,
) -> Result<SpanDevice, CompositeError> {
    sides.sort_by_key(|side| side.header.slot);
    if let Some(pair) = sides.windows(2).find(|pair| pair[0].header.slot == pair[1].header.slot) {
        return Err(CompositeError::Twice {
            first: pair[0].name.clone(),
            second: pair[1].name.clone(),
        });
    }
    let slots = sides.first().map_or(0, |side| side.header.slots) as usize;
    if sides.len() != slots || slots == 0 {
        if absent.is_empty() {
            absent
                .push(format!("{} that the list does not name", slots.saturating_sub(sides.len())));
        }
        return Err(CompositeError::Missing { kind, names: absent });
    }
    Ok(SpanDevice::open(sides))
}

impl BlockDevice for CompositeVolume {
    fn capacity(&self) -> u64 {
        self.inner().capacity()
    }

    fn capacity_max(&self) -> io::Result<Longest> {
        self.inner().capacity_max()
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        self.inner().resize(bytes)
    }

    fn read(&self, offset: u64, buf: &mut AlignedBuf) -> io::Result<()> {
        self.inner().read(offset, buf)
    }

    fn start_read(&self, ring: &dyn ReadRing, offset: u64, buf: Arc<AlignedBuf>, done: ReadDone) {
        self.inner().start_read(ring, offset, buf, done);
    }

    fn read_matching(
        &self,
        offset: u64,
        buf: &mut AlignedBuf,
        wanted: &dyn Fn(&[u8]) -> bool,
    ) -> bool {
        self.inner().read_matching(offset, buf, wanted)
    }

    fn write(&self, offset: u64, buf: &AlignedBuf) -> io::Result<()> {
        self.inner().write(offset, buf)
    }

    fn flush(&self) -> io::Result<()> {
        self.inner().flush()
    }

    fn submit(&self, batch: Vec<Io>) {
        self.inner().submit(batch);
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner().discard(offset, len)
    }

    fn allocate(&self, offset: u64, len: u64) -> io::Result<()> {
        self.inner().allocate(offset, len)
    }

    fn host_free(&self) -> Option<u64> {
        self.inner().host_free()
    }

    fn flush_timing(&self) -> FlushTiming {
        self.inner().flush_timing()
    }

    fn reset_flush_timing(&self) {
        self.inner().reset_flush_timing();
    }

    fn components(&self) -> Vec<ComponentStats> {
        let mut components = self.inner().components();
        let listed = self.descriptor.get().components;
        let absent: Vec<String> = listed
            .into_iter()
            .filter(|path| components.iter().all(|one| one.name != *path))
            .collect();
        components.extend(absent.into_iter().map(ComponentStats::absent));
        components
    }

    fn replace(&self, old: &Path, new: &Path) -> io::Result<()> {
        self.begin_replace(old, new).map_err(|error| {
            tracing::error!(%error, "no side of the mirror is replaced");
            errno_of(error)
        })
    }
}

/// What the asker of a [`BlockDevice::replace`] is told.
fn errno_of(error: CompositeError) -> io::Error {
    let errno = match error {
        CompositeError::Io { source, .. }
        | CompositeError::Device(DeviceError::Io { source, .. }) => {
            return source;
        }
        CompositeError::NoMirror => libc::EOPNOTSUPP,
        CompositeError::NoSide(_) => libc::ENXIO,
        CompositeError::Rebuilding => libc::EBUSY,
        CompositeError::Foreign(_) => libc::EEXIST,
        CompositeError::Device(DeviceError::WrongKind(_)) => libc::ENOTBLK,
        CompositeError::OwnPart(_)
        | CompositeError::Device(DeviceError::InUse { .. } | DeviceError::Busy(_)) => libc::ETXTBSY,
        _ => libc::EINVAL,
    };
    io::Error::from_raw_os_error(errno)
}
