//! What pages say of the pages below them, while redb reads: a page that is not the one which
//! belongs there is damage, and redb never sees it.
//!
//! redb itself looks at its checksums only when it must, and panics at what makes no sense: in a
//! destructor, that ends the process. Only pages are held against them that were there when the
//! file was opened. What redb has written since is its own, and its branches may not say the last
//! word of their children before the commit.

use super::tree;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Pages whose checksums are known at once; of what is read beyond, only our own checksums tell.
/// About 6 MiB.
const LINKS_MAX: usize = 1 << 17;

#[derive(Default)]
pub struct Links(Mutex<Known>);

#[derive(Default)]
struct Known {
    /// By a page's first block in the file.
    sums: HashMap<u64, u128>,
    /// A bit for each block that was written.
    written: Vec<u64>,
}

impl Known {
    fn is_written(&self, block: u64) -> bool {
        self.written.get((block / 64) as usize).is_some_and(|bits| bits & 1 << (block % 64) != 0)
    }
}

impl Links {
    /// Notes the checksums of pages, by their first blocks, as a sound page has them.
    pub fn learn(&self, links: Vec<(u64, u128)>) {
        let mut known = self.0.lock();
        for (block, sum) in links {
            if known.sums.len() < LINKS_MAX && !known.is_written(block) {
                known.sums.insert(block, sum);
            }
        }
    }

    /// Forgets all that pages said.
    pub fn clear(&self) {
        self.0.lock().sums.clear();
    }

    /// Blocks are about to be written.
    pub fn write(&self, blocks: std::ops::Range<u64>) {
        let mut known = self.0.lock();
        for block in blocks {
            let word = (block / 64) as usize;
            if known.written.len() <= word {
                known.written.resize(word + 1, 0);
            }
            known.written[word] |= 1 << (block % 64);
            known.sums.remove(&block);
        }
    }

    /// Whether `page`, which begins at `block`, may be the one that belongs there.
    pub fn check(&self, block: u64, page: &[u8]) -> bool {
        let Some(sum) = self.0.lock().sums.get(&block).copied() else { return true };
        let links = tree::judge(page, sum);
        links.is_some_and(|links| {
            self.learn(links);
            true
        })
    }
}
