//! The objects, byte by byte; `docs/format.md` describes them. All integers are little-endian.

pub(crate) use crate::codec::Id;
use crate::codec::{
    CODEC_STORED, Codec, Compression, IDENTITY_LEN, KEY_LEN, ObjectKey, Part, TABLE_PART, TAG_LEN,
    compress, decompress,
};
use crate::error::ObjectError;
use crate::runs::{Run, Sliced};
use ferry_env::Env;
use ferry_env::planted::{Bug, is_planted};
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

/// Unit of the map: a block of the device, in bytes.
pub(crate) const BLOCK: usize = ferry_device::BLOCK_SIZE;
/// A frame has at most so many bytes of contents.
pub(crate) const FRAME_MAX: usize = 64 << 10;
/// A data object has at most so many bytes of contents.
pub(crate) const DATA_MAX: usize = 16 << 20;
/// A log object may have so many bytes of contents more: the last write before it was sealed.
const LOG_SLACK: usize = 1 << 20;
/// Blocks of the device in one shard of the map: 1 GiB.
pub(crate) const SHARD_BLOCKS: u64 = (1 << 30) / BLOCK as u64;

const MAGIC: &[u8; 8] = b"FERRYOBJ";
/// The version of the format.
const VERSION: u16 = 1;
/// The version of a root with pins: a program that does not know pins would delete what they need.
const VERSION_PINS: u16 = 2;
/// The version of a clone's `super`, and of a root with the pin of a clone: a program that does not
/// know clones would look for all objects in one volume, and delete such a pin unasked.
const VERSION_CLONES: u16 = 3;
/// Volumes that a clone may refer to: its source, the source's source, and so on.
pub(crate) const PARENTS_MAX: usize = 16;
/// Bytes of a header.
pub(crate) const HEADER_LEN: usize = 128;
/// Bytes of an entry of the frame index.
const FRAME_LEN: usize = 24;
/// Bytes of an entry of a log object.
const ENTRY_LEN: usize = 32;
/// Bytes of a run in a shard of the map.
const RUN_LEN: usize = 32;
/// Frames that one object may have.
const FRAMES_MAX: usize = (DATA_MAX + LOG_SLACK) / FRAME_MAX;
/// So many bytes at the front of an object have its header and its frame index.
pub(crate) const FRONT_LEN: u64 = 8 << 10;

const _: () = assert!(HEADER_LEN + FRAMES_MAX * FRAME_LEN <= FRONT_LEN as usize);
const _: () = assert!(FRAME_MAX.is_multiple_of(BLOCK) && DATA_MAX.is_multiple_of(FRAME_MAX));
const _: () = assert!(DATA_MAX < u32::MAX as usize);

/// Name of the object that says what volume this is.
pub(crate) const SUPER: &str = "super";
/// What the names of claims begin with.
pub(crate) const CLAIMS: &str = "e/";
/// What the names of heartbeats begin with.
pub(crate) const BEATS: &str = "h/";
/// What the names of objects with the wrapped key begin with.
pub(crate) const KEYS: &str = "k/";
/// What the names of log objects and fences begin with.
pub(crate) const LOGS: &str = "w/";
/// What the names of shards begin with.
pub(crate) const SHARDS: &str = "m/";
/// What the names of roots begin with.
pub(crate) const ROOTS: &str = "c/";

pub(crate) fn claim_name(epoch: u64) -> String {
    format!("{CLAIMS}{epoch:016x}")
}

pub(crate) fn root_name(number: u64) -> String {
    format!("{ROOTS}{number:016x}")
}

pub(crate) fn key_name(number: u64) -> String {
    format!("{KEYS}{number:016x}")
}

pub(crate) fn log_name(seq: u64) -> String {
    format!("{LOGS}{seq:016x}")
}

pub(crate) fn shard_name(shard: u64, at: ObjectRef) -> String {
    format!("{SHARDS}{shard:08x}/{:016x}-{:x}", at.epoch, at.number)
}

/// The epoch and the number in the name of a shard.
pub(crate) fn object_of_shard(name: &str) -> Option<ObjectRef> {
    epoch_and_number(name.strip_prefix(SHARDS)?)
}

/// What the name of a data object or a shard ends with.
fn epoch_and_number(name: &str) -> Option<ObjectRef> {
    let (epoch, number) = name.split_once('/')?.1.split_once('-')?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    Some(ObjectRef { epoch: hex(epoch)?, number: hex(number)? })
}

/// The name of a heartbeat of an epoch.
pub(crate) fn beat_name(epoch: u64, number: u64) -> String {
    format!("{BEATS}{epoch:016x}-{number:016x}")
}

/// The epoch and the number of a heartbeat.
pub(crate) fn beat_of(name: &str) -> Option<(u64, u64)> {
    let (epoch, number) = name.strip_prefix(BEATS)?.split_once('-')?;
    Some((u64::from_str_radix(epoch, 16).ok()?, u64::from_str_radix(number, 16).ok()?))
}

/// Whether a volume has objects of such names.
pub(crate) fn is_object_name(name: &str) -> bool {
    name == SUPER
        || [CLAIMS, LOGS, ObjectRef::DATA, SHARDS, ROOTS, KEYS, BEATS]
            .iter()
            .any(|kind| name.starts_with(kind))
}

/// The number at the end of a claim's or a root's name.
pub(crate) fn number_of(name: &str) -> Option<u64> {
    u64::from_str_radix(name.rsplit('/').next()?, 16).ok()
}

/// An object that the map refers to: a data object, or a log object with `epoch` 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ObjectRef {
    pub epoch: u64,
    pub number: u64,
}

impl ObjectRef {
    /// What the names of data objects begin with.
    pub const DATA: &str = "s/";

    pub fn log(seq: u64) -> Self {
        Self { epoch: 0, number: seq }
    }

    pub fn is_log(self) -> bool {
        self.epoch == 0
    }

    /// Its name in the store.
    pub fn name(self) -> String {
        if self.is_log() {
            log_name(self.number)
        } else {
            format!(
                "{}{:02x}/{:016x}-{:x}",
                Self::DATA,
                self.number & 0xff,
                self.epoch,
                self.number
            )
        }
    }

    /// The object of this name, if the map can refer to it.
    pub fn of_name(name: &str) -> Option<Self> {
        if let Some(seq) = name.strip_prefix(LOGS) {
            return Some(Self::log(u64::from_str_radix(seq, 16).ok()?));
        }
        epoch_and_number(name.strip_prefix(Self::DATA)?)
    }

    fn kind(self) -> Kind {
        if self.is_log() { Kind::Log } else { Kind::Data }
    }
}

/// A block within the contents of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    pub object: ObjectRef,
    pub block: u64,
}

impl Sliced for Location {
    fn after(&self, skip: u64) -> Self {
        Self { block: self.block + skip, ..*self }
    }

    fn continues(&self, len: u64, next: &Self) -> bool {
        self.object == next.object && self.block + len == next.block
    }
}

/// What an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u16)]
pub(crate) enum Kind {
    Super = 1,
    Claim = 2,
    Log = 3,
    Fence = 4,
    Data = 5,
    Shard = 6,
    Root = 7,
    Key = 8,
}

impl Kind {
    fn of(number: u16) -> Option<Self> {
        use Kind::{Claim, Data, Fence, Key, Log, Root, Shard, Super};
        let all = [Super, Claim, Log, Fence, Data, Shard, Root, Key];
        all.into_iter().find(|kind| *kind as u16 == number)
    }

    /// It is read before the volume's key is known.
    fn is_plain(self) -> bool {
        matches!(self, Self::Super | Self::Key)
    }
}

/// What every object begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub kind: Kind,
    pub volume: Id,
    pub epoch: u64,
    pub number: u64,
    /// Random, of this object alone.
    pub id: Id,
    /// Of the log object, the fence or the root before it.
    pub previous: Id,
    /// Of a log object or a fence: the number that follows it in the log.
    pub next: u64,
}

/// A random number that names an object.
pub(crate) fn random_id(env: &Env) -> Id {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&env.entropy.next_u64().to_le_bytes());
    id[8..].copy_from_slice(&env.entropy.next_u64().to_le_bytes());
    id
}

/// A header of an object that is not part of the log.
pub(crate) fn new_header(kind: Kind, volume: Id, epoch: u64, number: u64, env: &Env) -> Header {
    let id = random_id(env);
    Header { kind, volume, epoch, number, id, previous: [0; 16], next: 0 }
}

/// Where a frame is, and how it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Frame {
    plain_offset: u32,
    plain_len: u32,
    stored_offset: u32,
    stored_len: u32,
    codec: u8,
    crc: u32,
}

/// A flag of a header: the object's parts are sealed.
const SEALED: u32 = 1;

/// Header and frame index of an object: enough to read and verify a part of it.
#[derive(Clone, Debug)]
pub(crate) struct Front {
    pub header: Header,
    name: String,
    identity: [u8; IDENTITY_LEN],
    /// What opens its parts, if they are sealed.
    key: Option<ObjectKey>,
    table: Range<usize>,
    table_crc: u32,
    frames: Vec<Frame>,
}

/// Appends integers.
struct Writer(Vec<u8>);

impl Writer {
    fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }
    fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }
    fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }
    fn text(&mut self, text: &str) {
        let text = &text.as_bytes()[..text.len().min(TEXT_MAX)];
        self.u16(text.len() as u16);
        self.bytes(text);
    }
    fn zeros_up_to(&mut self, len: usize) {
        assert!(self.0.len() <= len, "a field reaches behind its end");
        self.0.resize(len, 0);
    }
}

/// Texts in objects are cut off behind so many bytes.
const TEXT_MAX: usize = 255;

/// Takes integers from the front; `None` behind the end.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }
    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }
    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
    fn text(&mut self) -> Option<String> {
        let len = self.u16()?;
        Some(String::from_utf8_lossy(self.bytes(usize::from(len))?).into_owned())
    }
}

fn damaged(name: &str, what: &'static str) -> ObjectError {
    ObjectError::Damaged { name: name.into(), what }
}

/// An object: header, frame index, table, frames.
pub(crate) fn encode(codec: &Codec, header: &Header, table: &[u8], contents: &[u8]) -> Vec<u8> {
    encode_as(VERSION, codec, header, table, contents)
}

/// The object of a root.
pub(crate) fn encode_root(codec: &Codec, header: &Header, root: &Root) -> Vec<u8> {
    let version = match &root.pins[..] {
        [] => VERSION,
        pins if pins.iter().any(Pin::is_of_clone) => VERSION_CLONES,
        _ => VERSION_PINS,
    };
    encode_as(version, codec, header, &root.encode(), &[])
}

/// The object that says what volume this is.
pub(crate) fn encode_super(header: &Header, info: &Super) -> Vec<u8> {
    let version = if info.parents.is_empty() { VERSION } else { VERSION_CLONES };
    encode_as(version, &Codec::default(), header, &info.encode(), &[])
}

fn encode_as(
    version: u16,
    codec: &Codec,
    header: &Header,
    table: &[u8],
    contents: &[u8],
) -> Vec<u8> {
    assert!(contents.len() <= DATA_MAX + LOG_SLACK, "an object of {} bytes", contents.len());
    let key = codec.key.as_ref().filter(|_| !header.kind.is_plain());
    let key = key.map(|key| key.object(&header.id));
    let mut out = Writer(Vec::with_capacity(HEADER_LEN));
    out.bytes(MAGIC);
    out.u16(version);
    out.u16(header.kind as u16);
    out.u32(if key.is_some() { SEALED } else { 0 });
    out.bytes(&header.volume);
    out.u64(header.epoch);
    out.u64(header.number);
    out.bytes(&header.id);
    out.bytes(&header.previous);
    out.u64(header.next);
    out.u64(contents.len() as u64);
    let identity = identity(&out.0);
    let store = |part: Part<'_>, bytes: &[u8], to: &mut Vec<u8>| match &key {
        Some(key) => key.seal(part, bytes, to),
        None => to.extend_from_slice(bytes),
    };
    let mut stored_table = Vec::with_capacity(table.len() + TAG_LEN);
    store(table_part(&identity, table.len()), table, &mut stored_table);
    let frames = contents.len().div_ceil(FRAME_MAX);
    let front = HEADER_LEN + frames * FRAME_LEN + stored_table.len();
    let mut index = Writer(Vec::with_capacity(frames * FRAME_LEN));
    let mut body = Vec::with_capacity(contents.len() + frames * TAG_LEN);
    let mut buffer = Vec::new();
    for (n, frame) in contents.chunks(FRAME_MAX).enumerate() {
        let start = body.len();
        let (stored_as, bytes) = compress(codec.compression, frame, &mut buffer);
        let (number, plain_len) = (n as u32, frame.len() as u32);
        let part = Part { identity: &identity, number, codec: stored_as, plain_len };
        store(part, bytes, &mut body);
        index.u32((n * FRAME_MAX) as u32);
        index.u32(plain_len);
        index.u32((front + start) as u32);
        index.u32((body.len() - start) as u32);
        index.u32(u32::from(stored_as));
        index.u32(crc32c::crc32c(&body[start..]));
    }
    out.u32(stored_table.len() as u32);
    out.u32(frames as u32);
    out.u32(crc32c::crc32c(&index.0));
    out.u32(crc32c::crc32c(&stored_table));
    out.zeros_up_to(HEADER_LEN - 4);
    out.u32(crc32c::crc32c(&out.0));
    out.0.reserve_exact(front - HEADER_LEN + body.len());
    out.bytes(&index.0);
    out.bytes(&stored_table);
    out.bytes(&body);
    out.0
}

/// What identifies the object that begins with these bytes: they have that much.
fn identity(head: &[u8]) -> [u8; IDENTITY_LEN] {
    let mut identity = [0; IDENTITY_LEN];
    identity.copy_from_slice(&head[MAGIC.len()..MAGIC.len() + IDENTITY_LEN]);
    identity
}

fn table_part(identity: &[u8; IDENTITY_LEN], len: usize) -> Part<'_> {
    Part { identity, number: TABLE_PART, codec: CODEC_STORED, plain_len: len as u32 }
}

/// The header at the front of `bytes`, and the lengths that it has behind the common fields.
fn decode_header(name: &str, bytes: &[u8]) -> Result<(Header, Lengths), ObjectError> {
    let head = bytes.get(..HEADER_LEN).ok_or_else(|| damaged(name, "it is too short"))?;
    let (fields, crc) = head.split_at(HEADER_LEN - 4);
    if &fields[..8] != MAGIC {
        return Err(damaged(name, "it is no object of a FerryFS volume"));
    }
    if crc != crc32c::crc32c(fields).to_le_bytes() {
        return Err(damaged(name, "the checksum of its header is wrong"));
    }
    let mut fields = Reader(&fields[8..]);
    let parse = |fields: &mut Reader<'_>| -> Option<(u16, Option<Kind>, u32, Header, Lengths)> {
        let (version, kind, flags) = (fields.u16()?, Kind::of(fields.u16()?), fields.u32()?);
        let header = Header {
            kind: kind.unwrap_or(Kind::Super),
            volume: fields.array()?,
            epoch: fields.u64()?,
            number: fields.u64()?,
            id: fields.array()?,
            previous: fields.array()?,
            next: fields.u64()?,
        };
        let lengths = Lengths {
            contents: fields.u64()?,
            sealed: flags == SEALED,
            table: fields.u32()? as usize,
            frames: fields.u32()? as usize,
            index_crc: fields.u32()?,
            table_crc: fields.u32()?,
        };
        Some((version, kind, flags, header, lengths))
    };
    let parsed = parse(&mut fields).ok_or_else(|| damaged(name, "it is too short"))?;
    let (version, kind, flags, header, lengths) = parsed;
    let known = match version {
        VERSION => true,
        VERSION_PINS => kind == Some(Kind::Root),
        VERSION_CLONES => matches!(kind, Some(Kind::Root | Kind::Super)),
        _ => false,
    };
    if !known || !matches!(flags, 0 | SEALED) {
        return Err(ObjectError::Version { name: name.into(), version });
    }
    if kind.is_none() || lengths.frames > FRAMES_MAX {
        return Err(damaged(name, "its header says what cannot be"));
    }
    Ok((header, lengths))
}

/// What a header says of the rest of its object.
struct Lengths {
    contents: u64,
    sealed: bool,
    table: usize,
    frames: usize,
    index_crc: u32,
    table_crc: u32,
}

/// The header of an object of which at least [`HEADER_LEN`] bytes are there.
pub(crate) fn header(name: &str, bytes: &[u8]) -> Result<Header, ObjectError> {
    decode_header(name, bytes).map(|(header, _)| header)
}

/// Bytes of contents of the object that begins with these bytes.
pub(crate) fn contents_len(name: &str, bytes: &[u8]) -> Result<u64, ObjectError> {
    decode_header(name, bytes).map(|(_, lengths)| lengths.contents)
}

impl Front {
    /// From the first [`FRONT_LEN`] bytes of the object, or all of it if it has fewer.
    pub fn decode(codec: &Codec, name: &str, bytes: &[u8]) -> Result<Self, ObjectError> {
        let (header, lengths) = decode_header(name, bytes)?;
        let key = codec.key.as_ref().filter(|_| !header.kind.is_plain());
        if key.is_some() != lengths.sealed {
            let what = if lengths.sealed {
                "it is encrypted, and the volume is not"
            } else {
                "it is not encrypted as the volume is"
            };
            return Err(damaged(name, what));
        }
        let key = key.map(|key| key.object(&header.id));
        let tag = if lengths.sealed { TAG_LEN } else { 0 };
        if lengths.table < tag {
            return Err(damaged(name, "its table is too short"));
        }
        let index_end = HEADER_LEN + lengths.frames * FRAME_LEN;
        let index = bytes
            .get(HEADER_LEN..index_end)
            .ok_or_else(|| damaged(name, "it ends within its frame index"))?;
        if crc32c::crc32c(index) != lengths.index_crc {
            return Err(damaged(name, "the checksum of its frame index is wrong"));
        }
        let mut frames = Vec::with_capacity(lengths.frames);
        let (mut plain, mut stored) = (0_u64, (index_end + lengths.table) as u64);
        for entry in index.chunks_exact(FRAME_LEN) {
            let mut fields = Reader(entry);
            let mut next = || fields.u32().unwrap_or_default();
            let (plain_offset, plain_len, stored_offset, stored_len) =
                (next(), next(), next(), next());
            let frame = Frame {
                plain_offset,
                plain_len,
                stored_offset,
                stored_len,
                codec: next() as u8,
                crc: next(),
            };
            if u64::from(plain_offset) != plain
                || u64::from(stored_offset) != stored
                || plain_len == 0
                || plain_len as usize > FRAME_MAX
                || (frame.codec == CODEC_STORED && stored_len as usize != plain_len as usize + tag)
                || stored_len as usize > FRAME_MAX + tag
            {
                return Err(damaged(name, "its frames do not follow each other"));
            }
            plain += u64::from(plain_len);
            stored += u64::from(stored_len);
            frames.push(frame);
        }
        if plain != lengths.contents {
            return Err(damaged(name, "its frames are not its contents"));
        }
        let table = index_end..index_end + lengths.table;
        let (identity, table_crc) = (identity(bytes), lengths.table_crc);
        Ok(Self { header, name: name.into(), identity, key, table, table_crc, frames })
    }

    /// Refuses an object that is not of this kind, volume and number.
    pub fn expect(self, kind: Kind, volume: &Id, number: u64) -> Result<Self, ObjectError> {
        let found = &self.header;
        if found.kind == kind && found.volume == *volume && found.number == number {
            return Ok(self);
        }
        Err(damaged(&self.name, "it is another object than its name says"))
    }

    /// Refuses an object that is not the one the map refers to.
    pub fn expect_object(self, object: ObjectRef, volume: &Id) -> Result<Self, ObjectError> {
        if is_planted(Bug::CachedAnother) {
            return Ok(self);
        }
        let front = self.expect(object.kind(), volume, object.number)?;
        if object.is_log() || front.header.epoch == object.epoch {
            return Ok(front);
        }
        Err(damaged(&front.name, "it is another object than its name says"))
    }

    /// The first byte of the object behind its table.
    pub fn table_end(&self) -> u64 {
        self.table.end as u64
    }

    /// The table, in the first bytes of the object.
    pub fn table(&self, object: &[u8]) -> Result<Vec<u8>, ObjectError> {
        let table = object.get(self.table.clone());
        let table = table.ok_or_else(|| damaged(&self.name, "it ends within its table"))?;
        if crc32c::crc32c(table) != self.table_crc {
            return Err(damaged(&self.name, "the checksum of its table is wrong"));
        }
        let plain_len = table.len() - self.key.as_ref().map_or(0, |_| TAG_LEN);
        self.open(table_part(&self.identity, plain_len), table).map(Cow::into_owned)
    }

    /// Refuses an object that is not whole: all its bytes, from the first to the last, are those
    /// that its checksums, and in an encrypted volume its key, are of.
    pub fn verify(&self, object: &[u8]) -> Result<(), ObjectError> {
        self.table(object)?;
        let end_of = |frame: &Frame| u64::from(frame.stored_offset) + u64::from(frame.stored_len);
        if object.len() as u64 != self.frames.last().map_or(self.table_end(), end_of) {
            return Err(damaged(&self.name, "it has another length than its header says"));
        }
        let mut contents = vec![0; FRAME_MAX];
        for frame in &self.frames {
            let plain = u64::from(frame.plain_offset);
            let bytes = plain..plain + u64::from(frame.plain_len);
            let stored = frame.stored_offset as usize..end_of(frame) as usize;
            let contents = &mut contents[..frame.plain_len as usize];
            self.extract(&bytes, &object[stored], contents)?;
        }
        Ok(())
    }

    /// The bytes of a part, as they were before it was sealed.
    fn open<'a>(&self, part: Part<'_>, stored: &'a [u8]) -> Result<Cow<'a, [u8]>, ObjectError> {
        match &self.key {
            None => Ok(stored.into()),
            Some(key) => key.open(part, stored).map(Cow::from).ok_or_else(|| {
                damaged(&self.name, "it is not what was written with the volume's key")
            }),
        }
    }

    /// The frames that hold these bytes of the contents, each with its number.
    fn frames(&self, bytes: &Range<u64>) -> impl DoubleEndedIterator<Item = (u32, &Frame)> {
        let end_of = |frame: &Frame| u64::from(frame.plain_offset) + u64::from(frame.plain_len);
        let first = self.frames.partition_point(|frame| end_of(frame) <= bytes.start);
        let behind = self.frames.partition_point(|frame| u64::from(frame.plain_offset) < bytes.end);
        let frames = first..behind.max(first);
        frames.map(|number| (number as u32, &self.frames[number]))
    }

    /// The bytes of the object that have to be read for these bytes of its contents.
    pub fn stored(&self, bytes: &Range<u64>) -> Result<Range<u64>, ObjectError> {
        let frame = |found: (u32, _)| found.1;
        let ends = (self.frames(bytes).next(), self.frames(bytes).next_back());
        let (Some(first), Some(last)) = (ends.0.map(frame), ends.1.map(frame)) else {
            return Err(damaged(&self.name, "it does not have what the map says"));
        };
        if u64::from(last.plain_offset) + u64::from(last.plain_len) < bytes.end {
            return Err(damaged(&self.name, "it does not have what the map says"));
        }
        Ok(u64::from(first.stored_offset)
            ..u64::from(last.stored_offset) + u64::from(last.stored_len))
    }

    /// Copies these bytes of the contents to `out`, from what [`Front::stored`] asked for.
    pub fn extract(
        &self,
        bytes: &Range<u64>,
        stored: &[u8],
        out: &mut [u8],
    ) -> Result<(), ObjectError> {
        let base = self.stored(bytes)?.start;
        for (number, frame) in self.frames(bytes) {
            let from = (u64::from(frame.stored_offset) - base) as usize;
            let found = stored
                .get(from..from + frame.stored_len as usize)
                .ok_or_else(|| damaged(&self.name, "it is too short"))?;
            if crc32c::crc32c(found) != frame.crc {
                return Err(damaged(&self.name, "the checksum of a frame is wrong"));
            }
            let Frame { codec, plain_len, .. } = *frame;
            let part = Part { identity: &self.identity, number, codec, plain_len };
            let found = decompress(codec, self.open(part, found)?, plain_len as usize)
                .map_err(|what| damaged(&self.name, what))?;
            let plain = u64::from(frame.plain_offset);
            let (start, end) =
                (bytes.start.max(plain), bytes.end.min(plain + u64::from(frame.plain_len)));
            out[(start - bytes.start) as usize..(end - bytes.start) as usize]
                .copy_from_slice(&found[(start - plain) as usize..(end - plain) as usize]);
        }
        Ok(())
    }
}

/// What a log object says of a run of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    /// They hold zeros.
    Zeros,
    /// They are in this object, from this block of its contents on.
    Here { block: u32 },
    /// They are in a data object of the same epoch.
    Data { number: u64, block: u32 },
}

/// An entry of a log object.
pub(crate) type Entry = Run<EntryKind>;

/// The table of a log object.
pub(crate) fn encode_entries(entries: &[Entry]) -> Vec<u8> {
    let mut out = Writer(Vec::with_capacity(entries.len() * ENTRY_LEN));
    for entry in entries {
        let (kind, block, number) = match entry.value {
            EntryKind::Zeros => (0, 0, 0),
            EntryKind::Here { block } => (1, block, 0),
            EntryKind::Data { number, block } => (2, block, number),
        };
        out.u64(entry.start);
        out.u64(entry.len);
        out.u32(kind);
        out.u32(block);
        out.u64(number);
    }
    out.0
}

/// The entries of a log object, in order; later ones count.
pub(crate) fn decode_entries(name: &str, table: &[u8]) -> Result<Vec<Entry>, ObjectError> {
    let parse = |bytes: &[u8]| {
        let mut fields = Reader(bytes);
        let (start, len) = (fields.u64()?, fields.u64()?);
        let (kind, block, number) = (fields.u32()?, fields.u32()?, fields.u64()?);
        let value = match kind {
            0 => EntryKind::Zeros,
            1 => EntryKind::Here { block },
            2 => EntryKind::Data { number, block },
            _ => return None,
        };
        (len > 0 && start.checked_add(len).is_some()).then_some(Entry { start, len, value })
    };
    let entries = table.chunks_exact(ENTRY_LEN);
    if !entries.remainder().is_empty() {
        return Err(damaged(name, "it ends within an entry"));
    }
    let entries: Option<Vec<_>> = entries.map(parse).collect();
    entries.ok_or_else(|| damaged(name, "an entry says what cannot be"))
}

/// The table of a shard of the map.
pub(crate) fn encode_shard(runs: &[Run<Location>]) -> Vec<u8> {
    let mut out = Writer(Vec::with_capacity(runs.len() * RUN_LEN));
    for run in runs {
        out.u64(run.start);
        out.u32(run.len as u32);
        out.u32(run.value.block as u32);
        out.u64(run.value.object.epoch);
        out.u64(run.value.object.number);
    }
    out.0
}

/// The runs of a shard of the map.
pub(crate) fn decode_shard(
    name: &str,
    shard: u64,
    table: &[u8],
) -> Result<Vec<Run<Location>>, ObjectError> {
    let mut blocks = shard * SHARD_BLOCKS..(shard + 1) * SHARD_BLOCKS;
    let parse = |bytes: &[u8]| {
        let mut fields = Reader(bytes);
        let (start, len, block) = (fields.u64()?, fields.u32()?, fields.u32()?);
        let object = ObjectRef { epoch: fields.u64()?, number: fields.u64()? };
        let (len, block) = (u64::from(len), u64::from(block));
        let inside = len > 0 && blocks.contains(&start) && start + len <= blocks.end;
        // Runs ascend.
        blocks.start = start + len;
        inside.then_some(Run { start, len, value: Location { object, block } })
    };
    let runs = table.chunks_exact(RUN_LEN);
    if !runs.remainder().is_empty() {
        return Err(damaged(name, "it ends within a run"));
    }
    let runs: Option<Vec<_>> = runs.map(parse).collect();
    runs.ok_or_else(|| damaged(name, "a run says what cannot be"))
}

/// A volume that a clone refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parent {
    /// How the bucket, or the directory, calls it.
    pub name: String,
    pub volume: Id,
    /// The names that were free when the snapshot was made that the clone began as.
    pub free: FreeNames,
}

/// The first names that are free at some time: the number of a log object, and of a data object or
/// shard. An object of a later name is made later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreeNames {
    pub log: u64,
    pub object: ObjectRef,
}

impl FreeNames {
    /// Whether this object was made before.
    pub fn are_behind(self, object: ObjectRef) -> bool {
        if object.is_log() { object.number < self.log } else { object < self.object }
    }
}

/// The contents of `super`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Super {
    /// Bytes of the device.
    pub capacity: u64,
    /// Log objects that may be under way: W.
    pub window: u32,
    /// A data object ends at each of these bytes of the device: the first one, and one every so
    /// many bytes from there on.
    pub boundary: (u64, u64),
    pub compression: Compression,
    /// Objects are sealed.
    pub encrypted: bool,
    /// When it was made, in seconds since the Unix epoch.
    pub made_secs: u64,
    /// The volumes that it refers to, if it is a clone: the oldest first, its source last.
    pub parents: Vec<Parent>,
}

impl Super {
    /// The volume that wrote this object, if it was not this one. Names tell: a clone's own names
    /// go on where those of its source ended.
    pub fn parent_of(&self, object: ObjectRef) -> Option<usize> {
        self.parents.iter().position(|parent| parent.free.are_behind(object))
    }

    /// The epoch before the first one of this volume.
    pub fn epoch_before(&self) -> u64 {
        self.parents.last().map_or(0, |source| source.free.object.epoch)
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::new());
        out.u64(self.capacity);
        out.u32(self.window);
        out.u16(u16::from(self.encrypted));
        out.u16(match self.compression {
            Compression::Off => 0,
            Compression::Zstd => 1,
        });
        out.u64(self.boundary.0);
        out.u64(self.boundary.1);
        out.u64(self.made_secs);
        for Parent { name, volume, free } in &self.parents {
            out.bytes(volume);
            out.u64(free.log);
            out.u64(free.object.epoch);
            out.u64(free.object.number);
            out.text(name);
        }
        out.0
    }

    pub fn decode(table: &[u8]) -> Result<Self, ObjectError> {
        let mut fields = Reader(table);
        let mut parse = || {
            let (capacity, window) = (fields.u64()?, fields.u32()?);
            let encrypted = match fields.u16()? {
                0 => false,
                1 => true,
                _ => return None,
            };
            let compression = match fields.u16()? {
                0 => Compression::Off,
                1 => Compression::Zstd,
                _ => return None,
            };
            let mut found = Self {
                capacity,
                window,
                encrypted,
                compression,
                boundary: (fields.u64()?, fields.u64()?),
                made_secs: fields.u64()?,
                parents: Vec::new(),
            };
            while !fields.0.is_empty() {
                let parent = Parent {
                    volume: fields.array()?,
                    free: FreeNames {
                        log: fields.u64()?,
                        object: ObjectRef { epoch: fields.u64()?, number: fields.u64()? },
                    },
                    name: fields.text()?,
                };
                let FreeNames { log, object } = parent.free;
                let follows = |before: &Parent| {
                    before.free.log <= log && before.free.object.epoch < object.epoch
                };
                if object.epoch == 0 || !found.parents.last().is_none_or(follows) {
                    return None;
                }
                found.parents.push(parent);
            }
            let block = BLOCK as u64;
            let whole = |bytes: u64| bytes.is_multiple_of(block);
            let sane = window > 0
                && [capacity, found.boundary.0, found.boundary.1].into_iter().all(whole)
                && found.boundary.1 > 0;
            sane.then_some(found)
        };
        parse().ok_or_else(|| damaged(SUPER, "it says what cannot be"))
    }
}

/// The volume's key, wrapped: what an object of it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WrappedKey {
    pub kdf: Kdf,
    /// Random, so that no passphrase gives one key twice.
    pub salt: Id,
    pub sealed: [u8; KEY_LEN + TAG_LEN],
}

/// What it costs to derive a key from a passphrase with argon2id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kdf {
    /// Memory in KiB.
    pub memory_kib: u32,
    /// Passes over it.
    pub passes: u32,
}

impl Kdf {
    /// A program refuses what would take more memory, in KiB, or more passes.
    const MOST: Self = Self { memory_kib: 1 << 20, passes: 64 };
}

/// About 0.2 s of a processor.
impl Default for Kdf {
    fn default() -> Self {
        Self { memory_kib: 64 << 10, passes: 3 }
    }
}

impl WrappedKey {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::new());
        out.u32(self.kdf.memory_kib);
        out.u32(self.kdf.passes);
        out.bytes(&self.salt);
        out.bytes(&self.sealed);
        out.0
    }

    pub fn decode(name: &str, table: &[u8]) -> Result<Self, ObjectError> {
        let mut fields = Reader(table);
        let mut parse = || {
            let kdf = Kdf { memory_kib: fields.u32()?, passes: fields.u32()? };
            let sane = (8..=Kdf::MOST.memory_kib).contains(&kdf.memory_kib)
                && (1..=Kdf::MOST.passes).contains(&kdf.passes);
            let found = Self { kdf, salt: fields.array()?, sealed: fields.array()? };
            sane.then_some(found)
        };
        parse().ok_or_else(|| damaged(name, "it says what cannot be"))
    }
}

/// Who owns a volume: what a claim says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// Name of the host.
    pub host: String,
    /// Number of the machine, the same after it was started anew; empty if unknown.
    pub machine: String,
    /// Number of the machine's start; empty if unknown.
    pub boot: String,
    /// The process.
    pub pid: u32,
}

/// For people.
impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = if self.host.is_empty() { "an unnamed host" } else { &self.host };
        write!(f, "process {} on {host}", self.pid)
    }
}

/// The contents of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub owner: Owner,
    /// When it was made, in seconds since the Unix epoch: for people.
    pub made_secs: u64,
    /// The local log that has what the owner acknowledged and did not upload, if it has one.
    pub local: Option<Id>,
    /// The owner writes a heartbeat.
    pub beats: bool,
}

/// A flag of a claim: the owner has a local log.
const CLAIM_LOCAL: u32 = 1;
/// A flag of a claim: the owner writes a heartbeat.
const CLAIM_BEATS: u32 = 2;

impl Claim {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::new());
        out.u64(self.made_secs);
        out.u32(self.owner.pid);
        let local = if self.local.is_some() { CLAIM_LOCAL } else { 0 };
        out.u32(local | if self.beats { CLAIM_BEATS } else { 0 });
        out.text(&self.owner.host);
        out.text(&self.owner.machine);
        out.text(&self.owner.boot);
        out.bytes(self.local.as_ref().map_or(&[], |id| &id[..]));
        out.0
    }

    pub fn decode(name: &str, table: &[u8]) -> Result<Self, ObjectError> {
        let mut fields = Reader(table);
        let mut parse = || {
            let (made_secs, pid, flags) = (fields.u64()?, fields.u32()?, fields.u32()?);
            let (host, machine, boot) = (fields.text()?, fields.text()?, fields.text()?);
            let local = if flags & CLAIM_LOCAL == 0 { None } else { Some(fields.array()?) };
            let beats = flags & CLAIM_BEATS != 0;
            Some(Self { owner: Owner { host, machine, boot, pid }, made_secs, local, beats })
        };
        parse().ok_or_else(|| damaged(name, "it is too short"))
    }
}

/// What the owner of a root was doing when it wrote the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum RootState {
    /// It served the volume.
    Serving = 0,
    /// It had ended: nothing follows in the log.
    Closed = 1,
    /// It was taking the volume over.
    Takeover = 2,
}

impl RootState {
    fn decode(number: u32) -> Option<Self> {
        [Self::Serving, Self::Closed, Self::Takeover]
            .into_iter()
            .find(|state| *state as u32 == number)
    }
}

/// The contents of a root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Root {
    /// The first log object that it lacks.
    pub first: u64,
    /// Id of the log object or fence before that one.
    pub last_id: Id,
    /// What its owner was doing.
    pub state: RootState,
    /// The shards that are not empty, ascending, and where their newest map is.
    pub shards: Vec<(u64, ObjectRef)>,
    /// The snapshots, by the numbers of their roots, ascending.
    pub pins: Vec<Pin>,
}

/// A snapshot: a root that stays, with all that it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pin {
    pub name: String,
    /// The number of its root, which is the first one that has the pin.
    pub root: u64,
    /// The first log object that the root lacks; the epoch of the root, and the first number of a
    /// data object or shard of that epoch that was free when the root was made.
    pub free: FreeNames,
    /// When it was made, in seconds since the Unix epoch.
    pub made_secs: u64,
}

impl Pin {
    /// Whether its root may need this object. An object of a later name was made later.
    pub fn may_need(&self, object: ObjectRef) -> bool {
        self.free.are_behind(object)
    }

    /// Whether a clone needs it. The name of a snapshot has no such character.
    pub fn is_of_clone(&self) -> bool {
        self.name.contains('@')
    }
}

impl Root {
    /// The log objects of a backup's owners begin at least so far behind those of its source.
    pub const LOGS_BEHIND: u64 = 1 << 40;

    /// Whether it is a root of a backup that no snapshot has been copied to. A volume has shards.
    pub fn is_of_unfinished_backup(&self) -> bool {
        self.first >= Self::LOGS_BEHIND && self.shards.is_empty() && self.pins.is_empty()
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::new());
        out.u64(self.first);
        out.bytes(&self.last_id);
        out.u32(self.state as u32);
        out.u32(self.shards.len() as u32);
        for (shard, at) in &self.shards {
            out.u64(*shard);
            out.u64(at.epoch);
            out.u64(at.number);
        }
        for pin in &self.pins {
            out.u64(pin.root);
            out.u64(pin.free.log);
            out.u64(pin.free.object.epoch);
            out.u64(pin.free.object.number);
            out.u64(pin.made_secs);
            out.text(&pin.name);
        }
        out.0
    }

    pub fn decode(name: &str, table: &[u8]) -> Result<Self, ObjectError> {
        let mut fields = Reader(table);
        let mut parse = || {
            let (first, last_id, state) = (fields.u64()?, fields.array()?, fields.u32()?);
            let count = fields.u32()?;
            let state = RootState::decode(state)?;
            let mut shards: Vec<(u64, ObjectRef)> = Vec::new();
            for _ in 0..count {
                let shard = fields.u64()?;
                if shards.last().is_some_and(|(before, _)| *before >= shard) {
                    return None;
                }
                shards.push((shard, ObjectRef { epoch: fields.u64()?, number: fields.u64()? }));
            }
            let mut pins: Vec<Pin> = Vec::new();
            while !fields.0.is_empty() {
                let pin = Pin {
                    root: fields.u64()?,
                    free: FreeNames {
                        log: fields.u64()?,
                        object: ObjectRef { epoch: fields.u64()?, number: fields.u64()? },
                    },
                    made_secs: fields.u64()?,
                    name: fields.text()?,
                };
                // The pin of a clone has the root of the snapshot that the clone began as.
                let may_be_equal = u64::from(!pin.is_of_clone());
                if pins.last().is_some_and(|before| before.root + may_be_equal > pin.root) {
                    return None;
                }
                pins.push(pin);
            }
            Some(Self { first, last_id, state, shards, pins })
        };
        parse().ok_or_else(|| damaged(name, "it says what cannot be"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::VolumeKey;
    use std::sync::Arc;
    use zeroize::Zeroizing;

    fn header(kind: Kind) -> Header {
        Header {
            kind,
            volume: [1; 16],
            epoch: 2,
            number: 3,
            id: [4; 16],
            previous: [5; 16],
            next: 6,
        }
    }

    fn contents(len: usize) -> Vec<u8> {
        (0..len).map(|n| (n / 7 + n / 4096) as u8).collect()
    }

    fn a_clone_names_the_volumes_that_it_refers_to(volume: &Super) {
        let parent = |epoch, log| Parent {
            name: "a/b".into(),
            volume: [epoch as u8; 16],
            free: FreeNames { log, object: ObjectRef { epoch, number: 5 } },
        };
        let with = |parents| Super { parents, ..volume.clone() };
        let clone = with(vec![parent(2, 10), parent(4, 20)]);
        assert_eq!(Super::decode(&clone.encode()), Ok(clone.clone()));
        let of = |epoch, number| clone.parent_of(ObjectRef { epoch, number });
        assert_eq!([of(0, 9), of(0, 10), of(0, 19), of(0, 20)], [Some(0), Some(1), Some(1), None]);
        assert_eq!([of(2, 4), of(2, 5), of(4, 4), of(4, 5)], [Some(0), Some(1), Some(1), None]);
        assert_eq!((clone.epoch_before(), volume.epoch_before()), (4, 0));
        for wrong in [vec![parent(4, 20), parent(4, 20)], vec![parent(2, 20), parent(4, 10)]] {
            assert!(Super::decode(&with(wrong).encode()).is_err());
        }
        let version = |info| {
            let bytes = encode_super(&header(Kind::Super), info);
            assert!(decode_header("x", &bytes).is_ok());
            u16::from_le_bytes([bytes[8], bytes[9]])
        };
        assert_eq!((version(volume), version(&clone)), (1, 3));
    }

    #[test]
    fn any_range_is_read_from_the_frames_that_hold_it() {
        let contents = contents(3 * FRAME_MAX + 2 * BLOCK);
        let codec = Codec { compression: Compression::Off, key: None };
        let object = encode(&codec, &header(Kind::Data), b"table", &contents);
        let front = &object[..object.len().min(FRONT_LEN as usize)];
        let front = Front::decode(&codec, "x", front).expect("it is whole");
        assert_eq!(front.header, header(Kind::Data));
        assert_eq!(front.table(&object).expect("it is whole"), b"table");
        for range in [0..4096, 61440..69632, 65536..131_072, 196_608..204_800] {
            let stored = front.stored(&range).expect("it has it");
            assert!(stored.end - stored.start <= 2 * FRAME_MAX as u64, "no more than is needed");
            let mut out = vec![0; (range.end - range.start) as usize];
            let bytes = &object[stored.start as usize..stored.end as usize];
            front.extract(&range, bytes, &mut out).expect("it is whole");
            assert_eq!(out, contents[range.start as usize..range.end as usize]);
        }
        let behind = contents.len() as u64..contents.len() as u64 + 4096;
        assert!(front.stored(&behind).is_err(), "there is nothing behind the end");
    }

    /// What volumes may have: compressed or not, encrypted or not.
    fn codecs() -> [Codec; 4] {
        let key = || VolumeKey::new(&Zeroizing::new([9; KEY_LEN]), &[1; 16]);
        let codec =
            |compression, key: Option<VolumeKey>| Codec { compression, key: key.map(Arc::new) };
        [
            codec(Compression::Off, None),
            codec(Compression::Zstd, None),
            codec(Compression::Off, Some(key())),
            codec(Compression::Zstd, Some(key())),
        ]
    }

    fn entries() -> [Entry; 1] {
        [Entry { start: 7, len: 2, value: EntryKind::Here { block: 0 } }]
    }

    fn log_object(codec: &Codec, contents: &[u8]) -> Vec<u8> {
        encode(codec, &header(Kind::Log), &encode_entries(&entries()), contents)
    }

    /// All contents of a log object.
    fn read(codec: &Codec, object: &[u8], len: usize) -> Result<Vec<u8>, ObjectError> {
        let front = Front::decode(codec, "x", object)?;
        assert_eq!(decode_entries("x", &front.table(object)?)?, entries());
        let mut out = vec![0; len];
        let all = 0..len as u64;
        let stored = front.stored(&all)?;
        let stored = object.get(stored.start as usize..stored.end as usize);
        front.extract(&all, stored.unwrap_or_default(), &mut out)?;
        Ok(out)
    }

    #[test]
    fn each_damaged_byte_is_found() {
        let contents = contents(2 * BLOCK);
        for codec in codecs() {
            let object = log_object(&codec, &contents);
            assert_eq!(read(&codec, &object, contents.len()), Ok(contents.clone()));
            for at in 0..object.len() {
                let mut bad = object.clone();
                bad[at] ^= 0x40;
                assert!(read(&codec, &bad, contents.len()).is_err(), "byte {at}, {codec:?}");
            }
            for len in 0..object.len() {
                assert!(read(&codec, &object[..len], contents.len()).is_err(), "cut to {len}");
            }
        }
    }

    #[test]
    fn what_was_changed_with_its_checksums_is_found_by_the_key() {
        let contents = contents(3 * BLOCK);
        let [plain, _, _, sealed] = codecs();
        let object = log_object(&sealed, &contents);
        let ends = Front::decode(&sealed, "x", &object).expect("it is whole");
        let (table, frame) = (ends.table.clone(), ends.table.end..object.len());
        // A change of a byte, with the checksums that belong to it.
        let forge = |at: usize| {
            let mut bad = object.clone();
            bad[at] ^= 1;
            let crc = crc32c::crc32c(&bad[frame.clone()]).to_le_bytes();
            bad[HEADER_LEN + FRAME_LEN - 4..HEADER_LEN + FRAME_LEN].copy_from_slice(&crc);
            let crc = crc32c::crc32c(&bad[HEADER_LEN..HEADER_LEN + FRAME_LEN]).to_le_bytes();
            bad[104..108].copy_from_slice(&crc);
            let crc = crc32c::crc32c(&bad[table.clone()]).to_le_bytes();
            bad[108..112].copy_from_slice(&crc);
            let crc = crc32c::crc32c(&bad[..HEADER_LEN - 4]).to_le_bytes();
            bad[HEADER_LEN - 4..HEADER_LEN].copy_from_slice(&crc);
            bad
        };
        // Epoch, number, id, previous, next; the table; the frame.
        for at in [32, 40, 48, 64, 80, table.start, table.end - 1, frame.start, frame.end - 1] {
            let found = read(&sealed, &forge(at), contents.len());
            assert!(
                matches!(found, Err(ObjectError::Damaged { what, .. }) if what.contains("key")),
                "byte {at}: {found:?}"
            );
        }
        // Neither takes the other's objects.
        assert!(read(&plain, &object, contents.len()).is_err());
        assert!(read(&sealed, &log_object(&plain, &contents), contents.len()).is_err());
    }

    #[test]
    fn nothing_of_what_is_sealed_can_be_read() {
        let contents = b"a name that nobody may read ".repeat(2 * BLOCK / 28 + 1);
        let contents = &contents[..2 * BLOCK];
        let found = |codec: &Codec| {
            let object = log_object(codec, contents);
            object.windows(16).any(|bytes| bytes == b"a name that nobo")
        };
        let [plain, _, off, zstd] = codecs();
        assert!(found(&plain));
        assert!(!found(&off) && !found(&zstd));
    }

    #[test]
    fn the_name_of_an_object_tells_which_it_is() {
        for object in [ObjectRef::log(0x1234), ObjectRef { epoch: 0x1f, number: 0xabc }] {
            assert_eq!(ObjectRef::of_name(&object.name()), Some(object));
        }
        for name in ["super", "e/0000000000000001", "c/0000000000000001", "m/00000000/1-1", "s/x"] {
            assert_eq!(ObjectRef::of_name(name), None, "{name}");
        }
    }

    #[test]
    fn tables_are_read_as_they_were_written() {
        let found = Super {
            capacity: 1 << 30,
            window: 64,
            boundary: (65536, 1 << 20),
            compression: Compression::Zstd,
            encrypted: true,
            made_secs: 9,
            parents: vec![],
        };
        assert_eq!(Super::decode(&found.encode()), Ok(found.clone()));
        a_clone_names_the_volumes_that_it_refers_to(&found);
        let wrapped = WrappedKey { kdf: Kdf::default(), salt: [3; 16], sealed: [4; 48] };
        assert_eq!(WrappedKey::decode("x", &wrapped.encode()), Ok(wrapped));
        let owner = Owner { host: "a".into(), machine: "b".into(), boot: "c".into(), pid: 4 };
        for (local, beats) in [(None, false), (Some([7; 16]), false), (None, true)] {
            let claim = Claim { owner: owner.clone(), made_secs: 8, local, beats };
            assert_eq!(Claim::decode("x", &claim.encode()), Ok(claim));
        }
        let at = ObjectRef { epoch: 5, number: 6 };
        let root = Root {
            first: 1,
            last_id: [2; 16],
            state: RootState::Closed,
            shards: vec![(3, at)],
            pins: vec![],
        };
        let old = root.encode();
        assert_eq!(old.len(), 32 + 24, "without pins it is what it was before there were any");
        assert_eq!(Root::decode("x", &old), Ok(root.clone()));
        let free = FreeNames { log: 2, object: at };
        let pin = |root| Pin { name: "näme".into(), root, free, made_secs: 3 };
        let pinned = Root { pins: vec![pin(4), pin(9)], ..root.clone() };
        assert_eq!(Root::decode("x", &pinned.encode()), Ok(pinned.clone()));
        let disordered = Root { pins: vec![pin(9), pin(4)], ..root.clone() };
        assert!(Root::decode("x", &disordered.encode()).is_err());
        assert!(Root::decode("x", &pinned.encode()[..old.len() + 7]).is_err());
        let version = |root| {
            let bytes = encode_root(&Codec::default(), &header(Kind::Root), root);
            assert!(decode_header("x", &bytes).is_ok());
            u16::from_le_bytes([bytes[8], bytes[9]])
        };
        let of_clone = Pin { name: "näme@0@x".into(), ..pin(4) };
        let cloned =
            Root { pins: vec![pin(4), of_clone.clone(), of_clone, pin(9)], ..root.clone() };
        assert_eq!(Root::decode("x", &cloned.encode()), Ok(cloned.clone()));
        let twice = Root { pins: vec![pin(4), pin(4)], ..root.clone() };
        assert!(Root::decode("x", &twice.encode()).is_err());
        assert_eq!((version(&root), version(&pinned), version(&cloned)), (1, 2, 3));
        let mut shard = encode_as(2, &Codec::default(), &header(Kind::Shard), &[], &[]);
        assert!(matches!(decode_header("x", &shard), Err(ObjectError::Version { version: 2, .. })));
        shard = encode_as(4, &Codec::default(), &header(Kind::Root), &[], &[]);
        assert!(matches!(decode_header("x", &shard), Err(ObjectError::Version { version: 4, .. })));
        let runs =
            vec![Run { start: SHARD_BLOCKS + 1, len: 2, value: Location { object: at, block: 3 } }];
        assert_eq!(decode_shard("x", 1, &encode_shard(&runs)), Ok(runs.clone()));
        assert!(decode_shard("x", 0, &encode_shard(&runs)).is_err(), "of another shard");
        let twice = [runs[0].clone(), Run { start: SHARD_BLOCKS + 2, ..runs[0].clone() }];
        assert!(decode_shard("x", 1, &encode_shard(&twice)).is_err(), "a block is in two runs");
        let back = Root { shards: vec![(3, at), (3, at)], ..root };
        assert!(Root::decode("x", &back.encode()).is_err(), "a shard is there twice");
    }
}
