//! The home store on a small volume: what removed files leave of it is room again.

use crate::file::tests::*;

/// Fills the volume with files of a kind that lives in the home store alone. How many there was
/// room for.
fn fill(volume: &Volume, first: Ino) -> u64 {
    let mut made = 0;
    while made < 20_000 && volume.store.admit(Busy::Wait, None, 0).is_ok() {
        let file = volume.create(first + made);
        if volume.store.write(&file, At::End, &pattern(first + made, 1500), Touch::Nothing).is_err()
        {
            break;
        }
        volume.store.write_back(&file).unwrap();
        made += 1;
    }
    made
}

#[test]
fn removing_small_files_makes_room_for_others_and_for_data() {
    let volume = Volume::new(64, 256 << 10, 4 << 20, false);
    let mut counts = Vec::new();
    for round in 0..4 {
        let first = 10 + round * 100_000;
        let made = fill(&volume, first);
        counts.push(made);
        for ino in first..first + made {
            volume.remove(ino);
        }
        let file = volume.create(5);
        let mut written = 0;
        let write =
            |at| volume.store.write(&file, At::Offset(at), &pattern(at, 50_000), Touch::Nothing);
        while write(written).is_ok() {
            written += 50_000;
        }
        assert!(written > 6 << 20, "round {round}: {written} bytes of 16 MiB; {counts:?} files");
        volume.remove(5);
        volume.check();
    }
    assert!(counts[0] > 1000, "{counts:?}");
    let least = *counts.iter().min().unwrap();
    assert!(least * 10 >= counts[0] * 8, "{counts:?}");
}
