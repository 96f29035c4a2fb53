//! Values: the extents of files.

use crate::keys::records::{BadRecord, Fields, VALUE_VERSION};

/// Where a range of a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extent {
    /// In a segment: first block on the device (in units of [`BLOCK`]) and the CRC32C of each
    /// block.
    Data {
        /// Device block number.
        block: u64,
        /// One for each block; their number is the extent's length.
        crcs: Vec<u32>,
    },
    /// An unwritten extent: it has space, and reads as zeros. The number of blocks.
    Unwritten {
        /// Length in blocks.
        blocks: u64,
    },
    /// The contents were lost to damage: reading fails. They take no space.
    Lost {
        /// Length in blocks.
        blocks: u64,
    },
}

const EXTENT_DATA: u8 = 0;

const EXTENT_UNWRITTEN: u8 = 1;

const EXTENT_LOST: u8 = 2;

/// A longest data extent, in blocks.
pub const EXTENT_BLOCKS_MAX: usize = 2048;

impl Extent {
    /// Length in blocks.
    pub fn blocks(&self) -> u64 {
        match self {
            Extent::Data { crcs, .. } => crcs.len() as u64,
            Extent::Unwritten { blocks } | Extent::Lost { blocks } => *blocks,
        }
    }
    /// As stored.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Extent::Data { block, crcs } => {
                let mut out = Vec::with_capacity(10 + 4 * crcs.len());
                out.extend_from_slice(&[VALUE_VERSION, EXTENT_DATA]);
                out.extend_from_slice(&block.to_le_bytes());
                crcs.iter().for_each(|c| out.extend_from_slice(&c.to_le_bytes()));
                out
            }
            Extent::Unwritten { blocks } => Self::encode_length(EXTENT_UNWRITTEN, *blocks),
            Extent::Lost { blocks } => Self::encode_length(EXTENT_LOST, *blocks),
        }
    }
    fn encode_length(kind: u8, blocks: u64) -> Vec<u8> {
        let mut out = vec![VALUE_VERSION, kind];
        out.extend_from_slice(&blocks.to_le_bytes());
        out
    }
    /// From storage.
    pub fn decode(value: &[u8]) -> Result<Self, BadRecord> {
        let bad = BadRecord { what: "extent" };
        let mut f = Fields::open(value, "extent")?;
        match f.u8()? {
            EXTENT_DATA => {
                let block = f.u64()?;
                let (crcs, rest) = f.rest.as_chunks::<4>();
                if crcs.is_empty() || !rest.is_empty() || crcs.len() > EXTENT_BLOCKS_MAX {
                    return Err(bad);
                }
                Ok(Extent::Data {
                    block,
                    crcs: crcs.iter().map(|c| u32::from_le_bytes(*c)).collect(),
                })
            }
            kind @ (EXTENT_UNWRITTEN | EXTENT_LOST) => {
                let blocks = f.u64()?;
                f.end()?;
                match kind {
                    _ if blocks == 0 => Err(bad),
                    EXTENT_UNWRITTEN => Ok(Extent::Unwritten { blocks }),
                    _ => Ok(Extent::Lost { blocks }),
                }
            }
            _ => Err(bad),
        }
    }
}
