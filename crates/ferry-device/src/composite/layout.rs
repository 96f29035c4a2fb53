//! Where each byte of a linear or striped composite is.

use super::kind::Kind;

/// Bytes that a stripe puts on one component before it goes on to the next. A small commit (a log
/// record and its data) should touch few components, for each one that it touches is flushed; what
/// is written or read ahead in bulk (2 to 4 MiB) should touch many.
pub const STRIPE_CHUNK: u64 = 512 << 10;

/// Where a composite's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    /// Where each component begins, and where the last one ends.
    Linear(Vec<u64>),
    Stripe {
        components: u64,
        chunk: u64,
        capacity: u64,
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
                let mut starts = vec![0];
                lens.iter().for_each(|len| starts.push(starts[starts.len() - 1] + len));
                Self::Linear(starts)
            }
            Kind::Stripe => {
                let components = lens.len() as u64;
                let shortest = lens.iter().min().copied().unwrap_or_default();
                Self::Stripe { components, chunk, capacity: shortest / chunk * chunk * components }
            }
            Kind::Mirror => panic!("a mirror has no layout"),
        }
    }

    pub fn capacity(&self) -> u64 {
        match self {
            Self::Linear(starts) => starts[starts.len() - 1],
            Self::Stripe { capacity, .. } => *capacity,
        }
    }

    /// The slice that begins at `offset`, at most `len` bytes long.
    fn slice(&self, offset: u64, len: u64) -> Slice {
        match self {
            Self::Linear(starts) => {
                let component = starts.partition_point(|start| *start <= offset) - 1;
                let len = len.min(starts[component + 1] - offset);
                Slice { component, offset: offset - starts[component], len, at: 0 }
            }
            Self::Stripe { components, chunk, .. } => {
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
        let layout = Layout::new(Kind::Linear, &[8192, 4096, 16384], 0);
        assert_eq!(layout.capacity(), 28672);
        assert_eq!(flat(&layout, 4096, 12288), [(0, 4096, 4096), (1, 0, 4096), (2, 0, 4096)]);
        assert_eq!(flat(&layout, 24576, 4096), [(2, 12288, 4096)]);
        assert_eq!(flat(&layout, 0, 0), []);
    }

    #[test]
    fn a_stripe_takes_turns_and_uses_whole_chunks() {
        let layout = Layout::new(Kind::Stripe, &[20480, 16384], 8192);
        assert_eq!(layout.capacity(), 32768);
        assert_eq!(flat(&layout, 4096, 16384), [(0, 4096, 4096), (1, 0, 8192), (0, 8192, 4096)]);
        assert_eq!(layout.extents(4096, 16384), [(0, 4096, 8192), (1, 0, 8192)]);
    }
}
