//! The number of an inode, with the timeline of the volume that it is in.

use crate::api::{Errno, Ino, ROOT};
use crate::reader::Outer;
use crate::snapdir::number::{joined, parted};
use std::time::Duration;

/// What a volume is until it is rolled back, counted from the one that was mounted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Timeline(u64);

impl Timeline {
    /// The one that was the mount's first one but for so many.
    pub(crate) fn at(number: u64) -> Self {
        Self(number)
    }

    /// How many were before it.
    pub(crate) fn number(self) -> u64 {
        self.0
    }

    /// The one behind a rollback.
    pub(crate) fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// The inode that a number means in this timeline. `ESTALE`: it is one of another timeline.
    pub(crate) fn inner(self, number: Ino) -> Result<Ino, Errno> {
        match parted(number) {
            (0, ROOT) => Ok(ROOT),
            (timeline, ino) if timeline == self.0 => Ok(ino),
            _ => Err(Errno(libc::ESTALE)),
        }
    }
}

/// The next version may have another inode of each name, and other attributes.
impl Outer for Timeline {
    const VALID: Duration = Duration::ZERO;

    fn outer(self, ino: Ino) -> Result<Ino, Errno> {
        if ino == ROOT { Ok(ROOT) } else { joined(self.0, ino) }
    }

    fn above_root(self) -> Ino {
        ROOT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_an_earlier_timeline_are_stale_and_the_root_stays() {
        let (first, second) = (Timeline::default(), Timeline::default().next());
        for ino in [ROOT + 1, (1 << 44) - 1] {
            let numbers = [first.outer(ino), second.outer(ino)].map(|it| it.expect("it fits"));
            assert_eq!((first.inner(numbers[0]), second.inner(numbers[1])), (Ok(ino), Ok(ino)));
            assert_eq!(second.inner(numbers[0]), Err(Errno(libc::ESTALE)));
            assert_eq!(first.inner(numbers[1]), Err(Errno(libc::ESTALE)));
        }
        assert_eq!((first.outer(ROOT), second.outer(ROOT)), (Ok(ROOT), Ok(ROOT)));
        assert_eq!((first.inner(ROOT), second.inner(ROOT)), (Ok(ROOT), Ok(ROOT)));
        assert_eq!(first.outer(1 << 44), Err(Errno(libc::EOVERFLOW)));
    }
}
