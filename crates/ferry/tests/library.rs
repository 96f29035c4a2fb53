//! The library: a volume that is used in process.

use ferry::{Options, Volume};
use std::thread;

const THREADS: usize = 6;
const EACH: usize = 12;
/// From a few bytes to several requests' worth.
const LENS: [usize; 4] = [13, 5_000, 70_001, 2_500_000];

/// Every record says who wrote it and how long it is, so that one which was cut or mixed with
/// another is seen.
fn record(thread: usize, n: usize) -> Vec<u8> {
    let len = LENS[(thread + n) % LENS.len()];
    let mut record = vec![(thread * EACH + n) as u8; len];
    record[..8].copy_from_slice(&(len as u64).to_le_bytes());
    record
}

#[test]
fn appends_of_any_length_never_mix() -> std::io::Result<()> {
    let dir = tempfile::tempdir()?;
    let volume = Volume::make(dir.path().join("volume"), 512 << 20, &Options::default())?;
    let file = volume.create("/journal", 0o644)?;
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let file = &file;
            scope.spawn(move || {
                for n in 0..EACH {
                    let record = record(thread, n);
                    let at = file.append(&record).expect("there is room");
                    let mut back = vec![0; record.len()];
                    assert_eq!(file.read_at(&mut back, at).expect("readable"), record.len());
                    assert!(
                        back == record,
                        "append {n} of thread {thread} is where it was said to be"
                    );
                }
            });
        }
    });
    let mut all = vec![0; usize::try_from(volume.metadata("/journal")?.size).expect("it fits")];
    assert_eq!(file.read_at(&mut all, 0)?, all.len());
    let (mut rest, mut seen) = (&all[..], Vec::new());
    while !rest.is_empty() {
        let len = u64::from_le_bytes(rest[..8].try_into().expect("eight bytes")) as usize;
        let (one, more) = rest.split_at(len);
        assert!(one[8..].iter().all(|b| *b == one[8]), "one record, of one thread");
        seen.push(one[8]);
        rest = more;
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..(THREADS * EACH) as u8).collect::<Vec<_>>(), "each is there once");
    drop(file);
    volume.close()
}
