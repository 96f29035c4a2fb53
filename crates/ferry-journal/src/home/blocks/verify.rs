//! Holds what is on the device against the checksums in memory, both copies of it.

use crate::BadRange;
use crate::home::blocks::Pages;
use crate::home::unit::{NEVER, Sums, header, sum_of};
use ferry_device::{AlignedBuf, BLOCK_SIZE};

const BLOCK: u64 = BLOCK_SIZE as u64;

impl Pages {
    /// Both copies of the checksums of the unit in `segment`. Returns the bytes read.
    pub fn verify_sums(&self, segment: u32, found: &mut dyn FnMut(BadRange)) -> u64 {
        let unit = self.unit(segment);
        // While nothing is written, the device has what memory says.
        let _writing = self.writing.lock();
        let mut sums = unit.write();
        let unreadable = sums.unreadable().to_vec();
        if !unreadable.is_empty() {
            self.write_sums(&mut sums);
        }
        for offset in unreadable {
            let detail = "the device could not read checksums".to_owned();
            found(BadRange { what: "home store", offset, len: BLOCK, detail });
        }
        sums.verify(&self.disk, found)
    }

    /// Reads both copies of the blocks `from..from + count` of the unit in `segment`. Those of
    /// which a copy is not what was written are `suspect`: they are damaged, unless they belong to
    /// a commit that power was lost in. Returns the bytes read.
    pub fn suspects(
        &self,
        segment: u32,
        from: u32,
        count: u32,
        suspect: &mut dyn FnMut(u32),
    ) -> u64 {
        let unit = self.unit(segment);
        let _writing = self.writing.lock();
        let sums = unit.read();
        let mut buf = AlignedBuf::zeroed(count as usize * BLOCK_SIZE);
        let mut good = vec![true; count as usize];
        for copy in 0..2 {
            let whole = self.disk.read(sums.page_offset(from, copy), &mut buf).is_ok();
            for ((block, bytes), good) in
                (from..).zip(buf.chunks_exact_mut(BLOCK_SIZE)).zip(&mut good)
            {
                let [one, two] = sums.of(block);
                *good &= one == two && (one == NEVER || whole && self.is_good(&sums, block, bytes));
            }
        }
        (from..).zip(good).filter(|(_, good)| !good).for_each(|(block, _)| suspect(block));
        2 * u64::from(count) * BLOCK
    }

    /// Reports what is wrong with the copies of a block, if something is. If one copy alone has
    /// lost it, it is mended from the other.
    pub fn judge(&self, segment: u32, block: u32, found: &mut dyn FnMut(BadRange)) {
        let unit = self.unit(segment);
        let mut broken = Vec::new();
        {
            let _writing = self.writing.lock();
            let sums = unit.read();
            let mut buf = AlignedBuf::zeroed(BLOCK_SIZE);
            let mut right = None;
            for copy in 0..2 {
                let offset = sums.page_offset(block, copy);
                match self.disk.read(offset, &mut buf) {
                    _ if sums.of(block) == [NEVER; 2] => {}
                    Err(error) => {
                        broken.push(BadRange::unreadable("home store", offset, BLOCK, &error))
                    }
                    Ok(())
                        if self.is_header(sums.page_offset(block, 0))
                            && header::unseal(&mut buf) =>
                    {
                        right.get_or_insert(1);
                    }
                    Ok(()) if sums.of(block).contains(&sum_of(&buf)) => {
                        right.get_or_insert(sum_of(&buf));
                    }
                    Ok(()) => {
                        let detail = format!("the checksum of copy {} does not match", copy + 1);
                        broken.push(BadRange { what: "home store", offset, len: BLOCK, detail });
                    }
                }
            }
            let said = sums.of(block);
            for copy in (0..2).filter(|copy| right.is_some_and(|right| said[*copy] != right)) {
                let offset = sums.sum_offset(Sums::index_of(block), copy as u64);
                let detail = format!("copy {} of a checksum is not what it was", copy + 1);
                broken.push(BadRange { what: "home store", offset, len: BLOCK, detail });
            }
        }
        if broken.is_empty() {
            return;
        }
        // Reading it mends it, if the other copy is good.
        let other = self.read_one(&unit, segment, block).is_ok();
        let fate = if other { "the other copy is good" } else { "the other copy is lost too" };
        for bad in broken {
            found(BadRange { detail: format!("{}; {fate}", bad.detail), ..bad });
        }
    }

    fn is_good(&self, sums: &Sums, block: u32, bytes: &mut [u8]) -> bool {
        match self.is_header(sums.page_offset(block, 0)) {
            true => header::unseal(bytes),
            false => sums.of(block).contains(&sum_of(bytes)),
        }
    }
}
