//! Another length for a composite's components.
//!
//! First each device that is too short becomes longer. Then the headers say so, each with a higher
//! generation than before. At the end files are cut. So each header's length is there at every
//! moment. After a crash the headers of a set may say different lengths, each the old one or the
//! new one, and the shortest of them decides.

use super::component::Component;
use super::header::HEAD_LEN;
use crate::buffer::BLOCK_SIZE;
use crate::device::Longest;
use std::io;
use std::sync::Arc;

/// Makes the devices that are shorter as long as is asked, behind their heads. After an error they
/// have the lengths that they had.
pub(super) fn lengthen<'a>(
    wanted: impl Iterator<Item = (&'a Arc<Component>, u64)>,
) -> io::Result<()> {
    let mut changed: Vec<(&Arc<Component>, u64)> = Vec::new();
    for (one, len) in wanted {
        let before = one.device().capacity();
        if before >= HEAD_LEN + len {
            continue;
        }
        changed.push((one, before));
        if let Err(error) = one.device().resize(HEAD_LEN + len) {
            tracing::warn!(component = one.name, %error, "a component cannot be made longer");
            for (one, before) in changed {
                if let Err(error) = one.device().resize(before) {
                    tracing::warn!(component = one.name, %error, "a component stays longer than it was");
                }
            }
            return Err(error);
        }
    }
    Ok(())
}

/// Cuts what lies behind the lengths that the headers say. The first error counts, and the others
/// are cut all the same.
pub(super) fn cut<'a>(lens: impl Iterator<Item = (&'a Arc<Component>, u64)>) -> io::Result<()> {
    let longer = lens.filter(|(one, len)| one.device().capacity() > HEAD_LEN + len);
    let mut all = Ok(());
    for (one, len) in longer {
        all = all.and(one.device().resize(HEAD_LEN + len));
    }
    all
}

/// How long the component may become behind its head.
fn longest(one: &Component) -> io::Result<Longest> {
    let block = BLOCK_SIZE as u64;
    let behind = |bytes: u64| bytes.saturating_sub(HEAD_LEN) / block * block;
    Ok(one.device().capacity_max()?.map(behind))
}

/// The same of the one that may become least long.
pub(super) fn least<'a>(
    components: impl Iterator<Item = &'a Arc<Component>>,
) -> io::Result<Longest> {
    let all = components.map(|one| longest(one)).collect::<io::Result<Vec<_>>>()?;
    let least = all.into_iter().min_by_key(|longest| longest.bytes());
    least.ok_or_else(|| io::Error::from_raw_os_error(libc::EOPNOTSUPP))
}
