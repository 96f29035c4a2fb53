//! `ferry warm`: contents of files are brought into the device's cache on a local disk.

use crate::api::{Answer, Cx, Errno, Ino, ROOT, Stop, ioctl};
use crate::cache::pages::Known;
use crate::error::FsError;
use crate::extents::Mapping;
use crate::inode::incore::Inode;
use crate::keys::BLOCK;
use crate::local::jobs::BlockingDrop;
use crate::local::local_fs::LocalFs;
use crate::store::data_store::DataStore;
use ferry_device::Warmed;
use std::ops::Range;
use std::sync::Arc;

/// What a [`ioctl::WARM`] asks for.
struct Asked {
    begins: bool,
    /// Bytes of each file.
    range: Range<u64>,
    files: Vec<Ino>,
}

impl Asked {
    fn parse(input: &[u8]) -> Option<Self> {
        let (words, rest) = input.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        let [flags, offset, length, files @ ..] = &words[..] else { return None };
        let range = *offset..offset.checked_add(*length)?;
        let known = rest.is_empty() && flags & !ioctl::WARM_BEGINS == 0;
        let files = files.iter().copied().take_while(|ino| *ino != 0).collect();
        known.then_some(Self { begins: flags & ioctl::WARM_BEGINS != 0, range, files })
    }
}

fn answer(warmed: Warmed) -> Vec<u8> {
    [warmed.fetched_bytes, warmed.cached_bytes, u64::from(warmed.full)]
        .into_iter()
        .flat_map(u64::to_ne_bytes)
        .collect()
}

impl LocalFs {
    /// The answer to [`ioctl::WARM`], from a thread that may wait: extents may have to be read.
    pub(crate) fn do_warm(&self, cx: &Cx, input: &[u8]) -> Answer<Vec<u8>> {
        self.only_owner(cx)?;
        let asked = Asked::parse(input).ok_or(Errno(libc::EINVAL))?;
        // The device goes on with what it has begun.
        let parked = cx.park::<Vec<u8>>(Some(Box::new(|| ())));
        let warm = move |fs: &Self| match fs.device_ranges(&asked) {
            Err(error) => parked.complete(Err(fs.report("warm", ROOT, error))),
            Ok(ranges) => {
                let done = move |warmed: std::io::Result<Warmed>| {
                    let code = |e: std::io::Error| Errno(e.raw_os_error().unwrap_or(libc::EIO));
                    parked.complete(warmed.map(answer).map_err(code));
                };
                fs.dev.warm(asked.begins, &ranges, Box::new(done));
            }
        };
        if self.options.background {
            self.blocking_drops.push(BlockingDrop(Box::new(warm)));
        } else {
            warm(self);
        }
        Err(Stop::Parked)
    }

    fn device_ranges(&self, asked: &Asked) -> Result<Vec<Range<u64>>, FsError> {
        let mut ranges = Vec::new();
        for ino in &asked.files {
            if let Some(inode) = self.table.get(*ino)? {
                self.data.device_ranges(&inode, &asked.range, &mut ranges)?;
            }
        }
        Ok(ranges)
    }
}

impl DataStore {
    /// Where on the device a range of a file is, whether it is in memory or not. What is not
    /// written yet is left out.
    fn device_ranges(
        &self,
        inode: &Arc<Inode>,
        bytes: &Range<u64>,
        ranges: &mut Vec<Range<u64>>,
    ) -> Result<(), FsError> {
        let size = inode.state.share().rec.size;
        let end = bytes.end.min(size).div_ceil(BLOCK);
        self.look_by_window(inode, bytes.start / BLOCK..end, mapped, |found| {
            for block in found {
                match ranges.last_mut() {
                    Some(last) if last.end == block * BLOCK => last.end += BLOCK,
                    _ => ranges.push(block * BLOCK..(block + 1) * BLOCK),
                }
            }
        })
    }
}

/// The blocks of the device that have data of `chunk`, or the window to load first.
fn mapped(inode: &Inode, chunk: &Range<u64>) -> Result<Vec<u64>, u64> {
    let state = inode.state.share();
    let pages = inode.file.pages.read();
    let mut blocks = Vec::new();
    for block in chunk.clone() {
        match pages.mapping(block, state.logged.blocks) {
            Known::Load(window) => return Err(window),
            Known::Is(Mapping::Data(dev, _)) => blocks.push(dev),
            Known::Is(_) => {}
        }
    }
    Ok(blocks)
}
