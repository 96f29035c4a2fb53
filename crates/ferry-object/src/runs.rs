//! Runs of device blocks, each with a value: what lies where.

use std::collections::BTreeMap;

/// A value of a run whose blocks have consecutive parts of it.
pub trait Sliced: Clone {
    /// The value of the run from its block number `skip` on.
    fn after(&self, skip: u64) -> Self;
    /// Whether `next` continues a run of `len` blocks with this value, so that the two are one.
    fn continues(&self, len: u64, next: &Self) -> bool;
}

/// A run: its first block, its number of blocks, its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run<V> {
    /// First block.
    pub start: u64,
    /// Number of blocks, at least one.
    pub len: u64,
    /// What its blocks hold.
    pub value: V,
}

impl<V> Run<V> {
    /// The block behind it.
    pub fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// Runs that do not overlap, by their first block.
#[derive(Clone, Debug)]
pub struct RunMap<V> {
    runs: BTreeMap<u64, (u64, V)>,
}

impl<V> Default for RunMap<V> {
    fn default() -> Self {
        Self { runs: BTreeMap::new() }
    }
}

impl<V: Sliced> RunMap<V> {
    /// A map of runs that ascend, and of which no two have a block in common.
    pub fn from_sorted(runs: impl Iterator<Item = Run<V>>) -> Self {
        let mut sorted: Vec<(u64, (u64, V))> = Vec::new();
        for Run { start, len, value } in runs {
            match sorted.last_mut() {
                Some((first, (before, earlier)))
                    if *first + *before == start && earlier.continues(*before, &value) =>
                {
                    *before += len;
                }
                _ => sorted.push((start, (len, value))),
            }
        }
        Self { runs: sorted.into_iter().collect() }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Number of runs.
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Behind the last run.
    pub fn end(&self) -> u64 {
        self.runs.last_key_value().map_or(0, |(start, (len, _))| start + len)
    }

    /// All runs, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Run<V>> + '_ {
        self.runs.iter().map(|(start, (len, value))| Run {
            start: *start,
            len: *len,
            value: value.clone(),
        })
    }

    /// Removes whatever lies in the range, and returns it.
    pub fn remove(&mut self, start: u64, len: u64) -> Vec<Run<V>> {
        let end = start + len;
        let mut removed = Vec::new();
        let first = self.runs.range(..start).next_back().map(|(first, _)| *first);
        let inside: Vec<u64> =
            first.into_iter().chain(self.runs.range(start..end).map(|(first, _)| *first)).collect();
        for first in inside {
            let Some((run_len, value)) = self.runs.remove(&first) else { continue };
            let run_end = first + run_len;
            if first < start {
                self.runs.insert(first, (start.min(run_end) - first, value.clone()));
            }
            if run_end > end {
                self.runs.insert(end, (run_end - end, value.after(end - first)));
            }
            let (from, to) = (first.max(start), run_end.min(end));
            if from < to {
                removed.push(Run { start: from, len: to - from, value: value.after(from - first) });
            }
        }
        removed
    }

    /// Gives the range a value, and returns what lay there before.
    pub fn insert(&mut self, start: u64, len: u64, value: V) -> Vec<Run<V>> {
        assert!(len > 0, "a run has blocks");
        let removed = self.remove(start, len);
        if let Some((first, (before, earlier))) = self.runs.range_mut(..start).next_back()
            && *first + *before == start
            && earlier.continues(*before, &value)
        {
            *before += len;
        } else {
            self.runs.insert(start, (len, value));
        }
        removed
    }

    /// What lies in the range, cut to it, ascending. What is not in it has no value.
    pub fn find(&self, start: u64, len: u64) -> impl Iterator<Item = Run<V>> + '_ {
        let end = start + len;
        let first = self.runs.range(..=start).next_back().map_or(start, |(first, _)| *first);
        self.runs.range(first..end).filter_map(move |(first, (run_len, value))| {
            let (from, to) = ((*first).max(start), (first + run_len).min(end));
            (from < to).then(|| Run {
                start: from,
                len: to - from,
                value: value.after(from - first),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct At(u64);

    impl Sliced for At {
        fn after(&self, skip: u64) -> Self {
            Self(self.0 + skip)
        }
        fn continues(&self, len: u64, next: &Self) -> bool {
            self.0 + len == next.0
        }
    }

    /// What each block of the map has.
    fn held(map: &RunMap<At>) -> Vec<Option<u64>> {
        let mut found = vec![None; 80];
        for run in map.iter() {
            for n in 0..run.len {
                let block = &mut found[(run.start + n) as usize];
                assert_eq!(block.replace(run.value.0 + n), None, "two runs have a block");
            }
        }
        found
    }

    proptest! {
        #[test]
        fn runs_hold_what_one_value_a_block_holds(
            steps in prop::collection::vec((any::<bool>(), 0..60u64, 1..20u64, 0..100u64), 1..40),
        ) {
            let (mut map, mut blocks) = (RunMap::default(), vec![None; 80]);
            for (insert, start, len, value) in steps {
                let before: Vec<_> = map.find(start, len).collect();
                let removed = if insert {
                    map.insert(start, len, At(value))
                } else {
                    map.remove(start, len)
                };
                prop_assert_eq!(before, removed);
                for n in 0..len {
                    blocks[(start + n) as usize] = insert.then_some(value + n);
                }
                prop_assert_eq!(&held(&map), &blocks);
                prop_assert_eq!(&held(&RunMap::from_sorted(map.iter())), &blocks);
            }
        }
    }
}
