//! A range of garbage, wherever it is on a volume, costs what it covers and nothing else.

use super::*;

/// The device offset of each block of each file, by path.
type Offsets = BTreeMap<String, Vec<(usize, u64)>>;

fn offsets(volume: &Volume, snapshot: &Snapshot) -> Offsets {
    let mut offsets = Offsets::new();
    volume.edit(|image| {
        for (path, _) in
            snapshot.iter().filter(|(_, seen)| seen.mode & libc::S_IFMT == libc::S_IFREG)
        {
            let of_file = offsets.entry(path.clone()).or_default();
            for (offset, extent) in image.extents(path) {
                if let Extent::Data { block, crcs } = extent {
                    let blocks = (0..crcs.len() as u64)
                        .map(|n| ((offset / BLOCK + n) as usize, (block + n) * BLOCK));
                    of_file.extend(blocks);
                }
            }
        }
    });
    offsets
}

/// Garbage of `len` bytes at each offset where there is something, half its length apart.
fn costs_what_lay_there(volume: &Volume, len: u64) {
    let whole = volume.snapshot();
    let offsets = offsets(volume, &whole);
    let mut garbage = AlignedBuf::zeroed(len as usize);
    let mut lost = 0;
    for (n, at) in (0..=volume.dev.capacity() - len).step_by(len as usize / 2).enumerate() {
        let mut there = AlignedBuf::zeroed(len as usize);
        volume.dev.read(at, &mut there).unwrap();
        if there.iter().all(|byte| *byte == 0) {
            continue;
        }
        let mut state = n as u64 + 1;
        garbage.iter_mut().for_each(|byte| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (state >> 56) as u8;
        });
        let damaged = volume.copy();
        damaged.dev.write(at, &garbage).unwrap();
        let hit = at..at + len;
        let expected: Snapshot = whole
            .iter()
            .map(|(path, seen)| {
                let mut seen = seen.clone();
                for (block, offset) in offsets.get(path).into_iter().flatten() {
                    let snapshot = seen.contents.get_mut(*block).filter(|_| hit.contains(offset));
                    snapshot.into_iter().for_each(|contents| *contents = None);
                }
                (path.clone(), seen)
            })
            .collect();
        lost += usize::from(expected != whole);
        let what = format!("{len} bytes at {at}");
        assert!(damaged.snapshot() == expected, "{what}: before the repair");
        let report = damaged.repair();
        assert!(report.clean, "{what}: {:#?}", report.findings);
        assert!(damaged.snapshot() == expected, "{what}: after the repair");
        damaged.works(&what);
    }
    assert!(lost > 0, "some of it lay where files are");
}

#[test]
fn a_range_of_garbage_costs_only_what_it_covers() {
    let volume = Volume::new();
    costs_what_lay_there(&volume, 64 << 10);
    costs_what_lay_there(&volume, 256 << 10);
}

#[test]
fn repair_works_on_the_smallest_volume_and_with_a_moved_log() {
    let volume = Volume::of(16 << 20);
    costs_what_lay_there(&volume, 64 << 10);
    let fs = mount(&volume.dev, false);
    InProcess::default()
        .call(|cx| fs.ioctl(cx, ROOT, ioctl::GROW_LOG, &(4_u64 << 20).to_ne_bytes(), 0))
        .unwrap();
    fs.detach();
    fs.close().unwrap();
    let sb = read_superblock(&volume.dev).unwrap();
    assert!(
        sb.log_offset > sb.segments_offset && sb.home_map_offsets == volume.sb.home_map_offsets
    );
    costs_what_lay_there(&Volume { sb, ..volume }, 64 << 10);
}
