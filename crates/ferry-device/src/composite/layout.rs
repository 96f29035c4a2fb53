//! Where each byte of a linear or striped composite is.

use super::kind::Kind;
use crate::buffer::BLOCK_SIZE;

/// Bytes that a stripe puts on one component before it goes on to the next. A small commit (a log
/// record and its data) should touch few components, for each one that it touches is flushed; what
/// is written or read ahead in bulk (2 to 4 MiB) should touch many.
pub const STRIPE_CHUNK: u64 = 512 << 10;

/// Where a composite's bytes are. It does not say where they end: another length moves none of
/// them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// Where each component begins.
    Linear(Vec<u64>),
    Stripe {
        components: u64,
        chunk: u64,
    },
}

/// A part of a transfer that lies on one component without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slice {
    pub component: usize,
    /// First byte on the component.
    pub offset: u64,
    pub len: u64,
    /// First byte within the transfer.
    pub at: u64,
}

impl Layout {
    /// For components of these lengths, in bytes.
    ///
    /// # Panics For a mirror, where nothing is to choose.
    pub fn new(kind: Kind, lens: &[u64], chunk: u64) -> Self {
        match kind {
            Kind::Linear => {
                let next = |end: &mut u64, len: &u64| {
                    *end += len;
                    Some(*end - len)
                };
                Self::Linear(lens.iter().scan(0, next).collect())
            }
            Kind::Stripe => Self::Stripe { components: lens.len() as u64, chunk },
            Kind::Mirror => panic!("a mirror has no layout"),
        }
    }

    /// Bytes of the composite, with components of these lengths.
    pub fn capacity(&self, lens: &[u64]) -> u64 {
        match self {
            Self::Linear(_) => lens.iter().sum(),
            Self::Stripe { .. } => self.capacity_of(lens.iter().min().copied().unwrap_or_default()),
        }
    }

    /// Bytes of the composite, if its last component is so long, or a stripe's shortest one. No
    /// more than can be counted.
    pub fn capacity_of(&self, len: u64) -> u64 {
        match self {
            Self::Linear(starts) => starts[starts.len() - 1].saturating_add(len),
            Self::Stripe { components, chunk } => {
                let most = u64::MAX / components;
                len.min(most) / chunk * chunk * components
            }
        }
    }

    /// The components whose lengths may change, from this one on. Those of a linear composite that
    /// are in front keep theirs: what lies behind them would move.
    pub fn first_to_change(&self) -> usize {
        match self {
            Self::Linear(starts) => starts.len() - 1,
            Self::Stripe { .. } => 0,
        }
    }

    /// What length each of them has in a composite of so many bytes, or a little more.
    pub fn len_for(&self, bytes: u64) -> u64 {
        match self {
            Self::Linear(starts) => {
                let block = BLOCK_SIZE as u64;
                bytes.saturating_sub(starts[starts.len() - 1]).next_multiple_of(block).max(block)
            }
            Self::Stripe { components, chunk } => {
                bytes.div_ceil(*components).next_multiple_of(*chunk).max(*chunk)
            }
        }
    }

    /// The slice that begins at `offset`, at most `len` bytes long.
    fn slice(&self, offset: u64, len: u64) -> Slice {
        match self {
            Self::Linear(starts) => {
                let component = starts.partition_point(|start| *start <= offset) - 1;
                let len = starts.get(component + 1).map_or(len, |next| len.min(next - offset));
                Slice { component, offset: offset - starts[component], len, at: 0 }
            }
            Self::Stripe { components, chunk } => {
                let (number, within) = (offset / chunk, offset % chunk);
                Slice {
                    component: (number % components) as usize,
                    offset: number / components * chunk + within,
                    len: len.min(chunk - within),
                    at: 0,
                }
            }
        }
    }

    /// The slices of a range inside the composite, in order.
    pub fn slices(&self, offset: u64, len: u64) -> impl Iterator<Item = Slice> {
        let mut at = 0;
        std::iter::from_fn(move || {
            if at == len {
                return None;
            }
            let slice = Slice { at, ..self.slice(offset + at, len - at) };
            at += slice.len;
            Some(slice)
        })
    }

    /// The range as one range of each component that it touches: component, offset, length.
    pub fn extents(&self, offset: u64, len: u64) -> Vec<(usize, u64, u64)> {
        let mut extents: Vec<(usize, u64, u64)> = Vec::new();
        for slice in self.slices(offset, len) {
            match extents.iter_mut().find(|(component, ..)| *component == slice.component) {
                Some((_, _, len)) => *len += slice.len,
                None => extents.push((slice.component, slice.offset, slice.len)),
            }
        }
        extents
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(layout: &Layout, offset: u64, len: u64) -> Vec<(usize, u64, u64)> {
        layout.slices(offset, len).map(|p| (p.component, p.offset, p.len)).collect()
    }

    #[test]
    fn linear_goes_on_where_a_component_ends() {
        let lens = [8192, 4096, 16384];
        let layout = Layout::new(Kind::Linear, &lens, 0);
        assert_eq!(layout.capacity(&lens), 28672);
        assert_eq!(flat(&layout, 4096, 12288), [(0, 4096, 4096), (1, 0, 4096), (2, 0, 4096)]);
        assert_eq!(flat(&layout, 24576, 4096), [(2, 12288, 4096)]);
        assert_eq!(flat(&layout, 0, 0), []);
    }

    #[test]
    fn a_stripe_takes_turns_and_uses_whole_chunks() {
        let lens = [20480, 16384];
        let layout = Layout::new(Kind::Stripe, &lens, 8192);
        assert_eq!(layout.capacity(&lens), 32768);
        assert_eq!(flat(&layout, 4096, 16384), [(0, 4096, 4096), (1, 0, 8192), (0, 8192, 4096)]);
        assert_eq!(layout.extents(4096, 16384), [(0, 4096, 8192), (1, 0, 8192)]);
    }

    #[test]
    fn another_length_is_one_of_the_last_component_or_of_all() {
        let linear = Layout::new(Kind::Linear, &[8192, 4096, 16384], 0);
        assert_eq!((linear.first_to_change(), linear.len_for(32768)), (2, 20480));
        assert_eq!(linear.len_for(4096), 4096, "those in front stay");
        assert_eq!(linear.capacity_of(u64::MAX), u64::MAX);
        let stripe = Layout::new(Kind::Stripe, &[20480, 16384], 8192);
        assert_eq!((stripe.first_to_change(), stripe.len_for(40960)), (0, 24576));
        assert_eq!(stripe.capacity_of(24576), 49152, "whole chunks");
        assert_eq!(stripe.len_for(0), 8192);
        assert_eq!(stripe.capacity_of(u64::MAX), u64::MAX / 16384 * 16384);
    }
}
