//! A component's header: which set it belongs to, and as what. `docs/format.md` draws it.

use super::error::CompositeError;
use super::kind::Kind;
use crate::buffer::{AlignedBuf, BLOCK_SIZE};
use crate::device::BlockDevice;
use std::io;
use std::sync::Arc;

/// Bytes at the start of each component that are not the composite's.
pub const HEAD_LEN: u64 = 1 << 20;
/// Most components of a set; one bit of a word stands for each.
pub const COMPONENTS_MAX: usize = 32;
/// Most sides of a mirror.
pub const SIDES_MAX: usize = 16;
/// Where the two copies of the header are, in bytes.
pub(super) const HEADER_OFFSETS: [u64; 2] = [0, HEAD_LEN / 2];
/// Where the two slots of the write-intent map are, in bytes.
pub(super) const MAP_OFFSETS: [u64; 2] = [BLOCK_SIZE as u64, 2 * BLOCK_SIZE as u64];

const MAGIC: [u8; 8] = *b"FERRYCMP";
const VERSION: u32 = 1;
/// Where the list of active sides begins.
const ACTIVE_AT: usize = 80;
/// Where the CRC32C of everything before it is.
const CRC_AT: usize = BLOCK_SIZE - 4;
const _: () = assert!(8 + 4 + 4 + 16 + 8 + 4 + 4 + 8 + 8 + 8 + 4 + 4 == ACTIVE_AT);
const _: () = assert!(ACTIVE_AT + 8 * SIDES_MAX <= CRC_AT);

/// A device that says of itself that it is a component of the set.
pub struct Side {
    /// What messages call it.
    pub name: String,
    /// The whole device, with its head.
    pub device: Arc<dyn BlockDevice>,
    /// The header that was read from it.
    pub header: ComponentHeader,
}

/// What a component says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComponentHeader {
    /// How the components make one device.
    pub kind: Kind,
    /// Random id of the set, the same in all of its components.
    pub set: [u8; 16],
    /// Random id of this component. It is never used twice.
    pub id: u64,
    /// Its place among the components, from 0.
    pub slot: u32,
    /// Number of components in the set.
    pub slots: u32,
    /// Bytes behind the head.
    pub len: u64,
    /// Bytes of a stripe's chunk or of a mirror's region; 0 for linear.
    pub unit: u64,
    /// Raised whenever the header is written anew. A mirror's sides have the same: it is raised on
    /// all when the list of sides that have everything changes, or the length.
    pub generation: u64,
    /// A mirror's: the ids of the sides that have everything, as of that generation. Empty in a
    /// side that is being built.
    pub active: Vec<u64>,
}

impl ComponentHeader {
    /// The block that is stored.
    ///
    /// # Panics
    /// When there are more than [`SIDES_MAX`] active sides.
    pub fn encode(&self) -> AlignedBuf {
        assert!(
            self.active.len() <= SIDES_MAX,
            "the number of sides was checked when the set was made"
        );
        let kind = match self.kind {
            Kind::Linear => 1_u32,
            Kind::Stripe => 2,
            Kind::Mirror => 3,
        };
        let mut out = Vec::with_capacity(BLOCK_SIZE);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&kind.to_le_bytes());
        out.extend_from_slice(&self.set);
        out.extend_from_slice(&self.id.to_le_bytes());
        out.extend_from_slice(&self.slot.to_le_bytes());
        out.extend_from_slice(&self.slots.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
        out.extend_from_slice(&self.unit.to_le_bytes());
        out.extend_from_slice(&self.generation.to_le_bytes());
        out.extend_from_slice(&(self.active.len() as u32).to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        self.active.iter().for_each(|id| out.extend_from_slice(&id.to_le_bytes()));
        seal(&out)
    }

    fn decode(block: &[u8]) -> Option<Self> {
        if block[..8] != MAGIC || !is_sealed(block) || u32_at(block, 8) != VERSION {
            return None;
        }
        let kind = match u32_at(block, 12) {
            1 => Kind::Linear,
            2 => Kind::Stripe,
            3 => Kind::Mirror,
            _ => return None,
        };
        let sides = u32_at(block, 72) as usize;
        let header = Self {
            kind,
            set: block[16..32].try_into().expect("16 bytes"),
            id: u64_at(block, 32),
            slot: u32_at(block, 40),
            slots: u32_at(block, 44),
            len: u64_at(block, 48),
            unit: u64_at(block, 56),
            generation: u64_at(block, 64),
            active: (0..sides.min(SIDES_MAX)).map(|i| u64_at(block, ACTIVE_AT + 8 * i)).collect(),
        };
        let whole = |bytes: u64| bytes > 0 && bytes.is_multiple_of(BLOCK_SIZE as u64);
        let sound = header.slot < header.slots
            && header.slots as usize <= COMPONENTS_MAX
            && sides <= SIDES_MAX
            && whole(header.len)
            && (kind == Kind::Linear || whole(header.unit))
            && (kind != Kind::Mirror || header.unit.is_power_of_two());
        sound.then_some(header)
    }

    /// Reads a device's header: of the copies that are whole the one of the higher generation.
    /// `None`: there is none.
    pub fn read(dev: &dyn BlockDevice) -> io::Result<Option<Self>> {
        if dev.capacity() <= HEAD_LEN {
            return Ok(None);
        }
        let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
        let mut newest: Option<Self> = None;
        let mut failed = None;
        for offset in HEADER_OFFSETS {
            match dev.read(offset, &mut block) {
                Err(error) => failed = Some(error),
                Ok(()) => {
                    let copy = Self::decode(&block);
                    if copy.as_ref().map(|c| c.generation) > newest.as_ref().map(|n| n.generation) {
                        newest = copy;
                    }
                }
            }
        }
        match (newest, failed) {
            (None, Some(error)) => Err(error),
            (newest, _) => Ok(newest.filter(|header| header.len <= dev.capacity() - HEAD_LEN)),
        }
    }

    /// Writes both copies, one after the other, so that one of them is whole at any time.
    pub fn write(&self, dev: &dyn BlockDevice) -> io::Result<()> {
        let block = self.encode();
        for offset in HEADER_OFFSETS {
            dev.write(offset, &block)?;
            dev.flush()?;
        }
        Ok(())
    }

    /// The set's id as people write it.
    pub fn set_name(&self) -> String {
        hex(&self.set)
    }
}

/// A random id of a set or a component.
pub(super) fn random_set(env: &ferry_env::Env) -> [u8; 16] {
    let mut set = [0; 16];
    set[..8].copy_from_slice(&env.entropy.next_u64().to_le_bytes());
    set[8..].copy_from_slice(&env.entropy.next_u64().to_le_bytes());
    set
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A block with `fields` at its front and their checksum at its end.
pub(super) fn seal(fields: &[u8]) -> AlignedBuf {
    let mut block = AlignedBuf::zeroed(BLOCK_SIZE);
    block[..fields.len()].copy_from_slice(fields);
    let crc = crc32c::crc32c(&block[..CRC_AT]);
    block[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    block
}

pub(super) fn is_sealed(block: &[u8]) -> bool {
    crc32c::crc32c(&block[..CRC_AT]) == u32_at(block, CRC_AT)
}

pub(super) fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(block[at..at + 4].try_into().expect("4 bytes"))
}

pub(super) fn u64_at(block: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(block[at..at + 8].try_into().expect("8 bytes"))
}

/// `map_err` for an operation on a component.
pub(super) fn io_error(what: &'static str, name: &str) -> impl FnOnce(io::Error) -> CompositeError {
    let name = name.to_owned();
    move |source| CompositeError::Io { what, name, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemDevice;

    fn header() -> ComponentHeader {
        ComponentHeader {
            kind: Kind::Mirror,
            set: *b"0123456789abcdef",
            id: 7,
            slot: 1,
            slots: 2,
            len: 8 << 20,
            unit: 4 << 20,
            generation: 3,
            active: vec![5, 7],
        }
    }

    #[test]
    fn the_newer_whole_copy_counts() {
        let dev = MemDevice::new(9 << 20);
        assert_eq!(ComponentHeader::read(&dev).expect("readable"), None);
        header().write(&dev).expect("writable");
        assert_eq!(ComponentHeader::read(&dev).expect("readable"), Some(header()));
        let newer = ComponentHeader { generation: 4, active: vec![7], ..header() };
        dev.write(HEADER_OFFSETS[0], &newer.encode()).expect("writable");
        assert_eq!(ComponentHeader::read(&dev).expect("readable"), Some(newer.clone()));
        let mut torn = newer.encode();
        torn[100] ^= 1;
        dev.write(HEADER_OFFSETS[0], &torn).expect("writable");
        assert_eq!(ComponentHeader::read(&dev).expect("readable"), Some(header()));
    }

    #[test]
    fn an_impossible_header_is_refused() {
        let changes: [fn(&mut ComponentHeader); 5] = [
            |h| h.slot = 2,
            |h| h.unit = 3 << 20,
            |h| h.len = 100,
            |h| h.len = 10 << 20,
            |h| h.slots = 33,
        ];
        for change in changes {
            let mut header = header();
            change(&mut header);
            let dev = MemDevice::new(9 << 20);
            header.write(&dev).expect("writable");
            assert_eq!(ComponentHeader::read(&dev).expect("readable"), None, "{header:?}");
        }
    }
}
