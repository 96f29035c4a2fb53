//! The segments that the file owns: those of its units, spare ones, and dropped ones.

use super::HomeFile;

impl HomeFile {
    /// Segments that the file owns.
    pub fn segments(&self) -> Vec<u32> {
        let state = self.state.read();
        state.map.segments().chain(state.floating.iter().copied()).collect()
    }

    /// Bytes of the units that are attached.
    pub fn attached_bytes(&self) -> u64 {
        self.attached() as u64 * self.unit_bytes()
    }

    /// Units that are attached.
    pub fn attached(&self) -> usize {
        self.state.read().map.units.iter().flatten().count()
    }

    /// Segments ready to be attached.
    pub fn spare(&self) -> usize {
        let state = self.state.read();
        state.map.spare.len() + state.floating.len()
    }

    /// Those of them that the map names.
    pub fn kept_spare(&self) -> usize {
        self.state.read().map.spare.len()
    }

    /// Bytes of one unit.
    pub fn unit_bytes(&self) -> u64 {
        self.pages.segments().unit
    }

    /// Adds a spare segment. The map names it at the next sync if `keep`, so that the next opening
    /// finds it.
    pub fn add_spare(&self, segment: u32, keep: bool) {
        let mut state = self.state.write();
        if keep {
            state.map.spare.push(segment);
            state.changed = true;
        } else {
            state.floating.push(segment);
        }
    }

    /// Spare segments beyond `keep`, no longer owned: those that no map ever named.
    pub fn take_surplus(&self, keep: usize) -> Vec<u32> {
        let mut state = self.state.write();
        let surplus = (state.map.spare.len() + state.floating.len()).saturating_sub(keep);
        let at = state.floating.len().saturating_sub(surplus);
        state.floating.split_off(at)
    }

    /// Turns all spare segments but `keep` into dropped ones.
    pub fn drop_spare(&self, keep: usize) {
        let mut state = self.state.write();
        while state.map.spare.len() > keep {
            let segment = state.map.spare.pop().expect("longer than keep");
            state.dropped.push(segment);
            state.changed = true;
        }
    }

    /// Segments that no slot names any more, after [`HomeFile::settle`].
    pub fn take_dropped(&self) -> Vec<u32> {
        let mut state = self.state.write();
        if state.changed || state.other_behind {
            Vec::new()
        } else {
            std::mem::take(&mut state.dropped)
        }
    }
}
